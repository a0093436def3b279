"""Errors that a user can fix. Each message is one line that says the value, the bound and the remedy."""


class TransduceError(Exception):
    """Base class. The command line prints the message as one line and exits with status 2."""


class ConfigError(TransduceError):
    """A setting, or a combination of settings, is invalid.

    >>> from transduce import ConfigError, base, with_model
    >>> try:
    ...     with_model(base(), n_heads=0)
    ... except ConfigError as error:
    ...     print(error)
    model.n_heads is 0, must be at least 1: raise it
    """


class DataError(TransduceError):
    """Input is invalid: text, files, or prepared data.

    >>> from transduce import DataError
    >>> from transduce.data.corpora import find_corpus
    >>> try:
    ...     find_corpus(["missing.de", "missing.en"], None)
    ... except DataError as error:
    ...     print(error)
    missing.de is not a file: give a file of text
    """


class ModelFolderError(TransduceError):
    """A model folder is incomplete, damaged or in another format.

    >>> from transduce import ModelFolderError, load_model
    >>> try:
    ...     load_model("missing")
    ... except ModelFolderError as error:
    ...     print(error)
    missing/config.json cannot be read (No such file or directory): give a model folder
    """
