"""Errors with a name of their own. Other user mistakes are plain ValueError or TypeError."""


class UnsupportedModelError(ValueError):
    """The model does not fit; raised before anything is built, with the reason."""


class UndecodableError(ValueError):
    """A tokenizer's ``decode`` raised for tokens that the model emitted."""


class RowError(ValueError):
    """Nothing may follow one row's text: its scores are no numbers, or its rules contradict each
    other; or its tokenizer can't decode what was emitted. Whoever takes that row out of its batch
    can go on with the others.

    Attributes:
        row: its id.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message, row)
        self.row = row

    def __str__(self) -> str:
        return f"row {self.row}: {self.args[0]}"
