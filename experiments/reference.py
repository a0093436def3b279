"""Write docs/reference.md, the Python API, from the source and its docstrings: python -m experiments.reference"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
MODULES = (
    "transduce",
    "transduce.data.corpora",
    "transduce.data.prepare",
    "transduce.data.plan",
    "transduce.data.batches",
    "transduce.data.trees",
    "transduce.evaluation.metrics",
    "transduce.insight.attention",
    "transduce.insight.embed",
    "transduce.interop",
)
"""The public modules. The public names of each are in its `__all__`."""
INTRODUCTION = """# Python API

Every public name with its signature, its purpose and an example. `transduce` has what most programs need; the other
modules are public too. Names that are not on this page may change without notice. The tests run all examples.

The capital letters at the end of an array's name are its axes. `target_in_BT`, for example, has the axes B and T:

- in batches: B sentences, S source positions, T target positions, V entries of the vocabulary;
- in the model: D = d_model, L layers, H heads, Q queries, M attended positions, K = d_k, U = d_v;
- in search: R rows, one for each hypothesis;
- in plans: N examples, K shapes, M micro-batches.
"""
MAX_WIDTH = 100


def public_names() -> dict[str, Any]:
    """Each public object by its full name."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    return {
        f"{name}.{public}": getattr(module, public) for name, module in modules.items() for public in module.__all__
    }


def page() -> str:
    """The text of the page. An object that is public in two modules is described in the first of them."""
    described: list[Any] = []
    index, sections = list[str](), list[str]()
    for name in MODULES:
        module = importlib.import_module(name)
        values = {public: getattr(module, public) for public in module.__all__}
        index.append(f"- `{name}`: " + ", ".join(f"[{public}](#{public.lower()})" for public in values))
        first_line = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
        sections.append(f"## {name}\n\n{first_line}\n")
        repeated = [f"[{public}](#{public.lower()})" for public, value in values.items() if value in described]
        if repeated:
            sections.append(f"Described above, since `transduce` has them too: {', '.join(repeated)}.\n")
        new = {public: value for public, value in values.items() if value not in described}
        sections += [entry(public, value) for public, value in new.items()]
        described += new.values()
    return "\n".join([INTRODUCTION, *index, "", *sections])


def entry(name: str, value: Any) -> str:
    purpose, example = split_docstring(inspect.getdoc(value) or "")
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    parts = [f"### {name}", f"```python\n{declaration(node)}\n```", purpose]
    if isinstance(node, ast.ClassDef):
        explained = [f"- `{field.target.id}`: {text}" for field, text in fields(node) if text]
        parts += ["Fields:\n\n" + "\n".join(explained)] if explained else []
        methods = [method_line(method) for method in public_methods(node)]
        parts += ["Methods and properties:\n\n" + "\n".join(methods)] if methods else []
    return "\n\n".join([*parts, f"```pycon\n{example}\n```"]) + "\n"


def split_docstring(docstring: str) -> tuple[str, str]:
    """The text of a docstring, and its example."""
    text, marker, example = docstring.partition(">>> ")
    return text.strip(), textwrap.dedent(marker + example).strip()


# Declarations


def declaration(node: ast.stmt) -> str:
    """The signature of a function, or a class with its fields or the arguments of its constructor."""
    if isinstance(node, ast.FunctionDef):
        return f"def {signature(node)}"
    assert isinstance(node, ast.ClassDef)
    constructor = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    if constructor:
        return f"class {signature(constructor[0], node.name)}"
    bases = ", ".join(ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_"))
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    lines = [f"    {shown(field)}" for field, _ in fields(node)]
    return "\n".join([f"{head}:", *lines]) if lines else head


def signature(function: ast.FunctionDef, name: str | None = None, max_width: float = MAX_WIDTH) -> str:
    """The signature of a function, on one line or with one argument per line; of a method, without self and cls.

    With a `name`, that of a constructor's class, the type of the result is left out.
    """
    parts = [part for part in argument_list(function.args) if part not in ("self", "cls")]
    result = "" if name or function.returns is None else f" -> {ast.unparse(function.returns)}"
    line = f"{name or function.name}({', '.join(parts)}){result}"
    if len(line) <= max_width:
        return line
    inside = ",\n    ".join(parts)
    return f"{name or function.name}(\n    {inside},\n){result}"


def argument_list(arguments: ast.arguments) -> list[str]:
    """Each argument with its type and default, and the marks / and *. `ast.unparse` returns them as one text, in which
    the commas of a lambda look like those between arguments."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    parts = [argument(*pair) for pair in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        parts.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        parts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return parts if arguments.kwarg is None else [*parts, f"**{ast.unparse(arguments.kwarg)}"]


def argument(name_and_type: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(name_and_type)
    if default is None:
        return text
    return f"{text}{'=' if name_and_type.annotation is None else ' = '}{ast.unparse(default)}"


# Members of classes


class Field(ast.AnnAssign):
    target: ast.Name


def fields(node: ast.ClassDef) -> Iterator[tuple[Field, str]]:
    """The fields of a class, and the explanation in the string under each, which may be empty."""
    for part, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
            yield part, string_of(following)  # type: ignore[misc]


def string_of(node: ast.stmt | None) -> str:
    """The text of a statement that is only a string, on one line; otherwise nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def shown(field: Field) -> str:
    """A field with its type and default. Defaults that are made by a function are left out, as they are objects."""
    if isinstance(field.value, ast.Call):
        return f"{field.target.id}: {ast.unparse(field.annotation)}"
    return ast.unparse(field)


def public_methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """The methods with a docstring whose names have no leading underscore."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return [method for method in methods if not method.name.startswith("_") and ast.get_docstring(method)]


def method_line(method: ast.FunctionDef) -> str:
    text = " ".join((ast.get_docstring(method) or "").split())
    if any(ast.unparse(decorator) in ("property", "cached_property") for decorator in method.decorator_list):
        return f"- `{method.name}`: {text}"
    return f"- `{signature(method, max_width=math.inf)}`: {text}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
