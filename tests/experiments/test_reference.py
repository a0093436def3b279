"""The signatures on the page of the Python API."""

from __future__ import annotations

import ast

import pytest

from experiments.reference import declaration

SIGNATURES = [
    "def f()",
    "def f(x, y: int = 1, *rest: str, z=2, **settings: Any) -> dict[str, int]",
    "def f(a: int, /, b, *, c: tuple[int, ...] = (1, 2), d: str) -> None",
    "def f(progress: Progress = lambda stage, done, total: None, text: str = 'a, b=c')",
]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_signature_is_shown_as_it_is_written(signature: str) -> None:
    (node,) = ast.parse(f"{signature}: ...").body
    assert declaration(node) == signature


def test_a_long_signature_has_one_argument_on_each_line() -> None:
    names = [f"argument_{n}: int = 1000" for n in range(5)]
    (node,) = ast.parse(f"def f({', '.join(names)}, *, done=lambda x, y: x): ...").body
    inside = "".join(f"    {part},\n" for part in [*names, "*", "done=lambda x, y: x"])
    assert declaration(node) == f"def f(\n{inside})"
