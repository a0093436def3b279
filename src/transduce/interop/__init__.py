"""Models in the formats of other programs. Each function needs packages of the extra `export`."""

from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import from_marian, to_marian

__all__ = ["from_marian", "to_ctranslate2", "to_marian"]
