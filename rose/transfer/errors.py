"""The one error of weight transfer."""


class TransferError(RuntimeError):
    """A version can't be written, committed or trusted; the text names the file and the tensor."""
