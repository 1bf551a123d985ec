"""The errors of weight transfer."""


class TransferError(RuntimeError):
    """A version can't be written, committed, found or trusted; the message names file and block."""


class Missing(TransferError):
    """A file does not exist: it was never written, or has been removed since."""


class Corrupted(TransferError):
    """Bytes changed after they were written, or have a format that this program can't read."""
