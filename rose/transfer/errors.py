"""The errors of weight transfer."""


class TransferError(RuntimeError):
    """A version can't be written, committed, found or trusted; the text names the file and the
    block."""


class Missing(TransferError):
    """A file is not there: it was never written, or has been collected since."""


class Corrupted(TransferError):
    """Bytes are not what they were when they were written, or not what this program reads."""
