"""What a user can put right. Each message is one line: the value, the bound, the remedy."""


class TransduceError(Exception):
    """The command line prints it as one line and exits with 2."""


class ConfigError(TransduceError):
    """A setting that cannot be."""


class DataError(TransduceError):
    """Input that cannot be used as it is."""


class ModelFolderError(TransduceError):
    """A model folder that is not whole, or not ours."""
