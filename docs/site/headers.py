"""Pages of the C++ reference: one for each public header, from its comments and from examples/reference.

A header is read as text: its first comment introduces the page; then each group of declarations, with the comment above
it, becomes a section, named for what it declares. The example of NAME is the body of example_NAME.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

FUNCTION = re.compile(r"(?<![\w:.])(?!operator|requires|decltype|static_assert)([a-z_]\w*)\(")
NAMESPACE = re.compile(r"^namespace headway(?:::\w+)? \{\n", re.MULTILINE)
TYPE = re.compile(r"^(?:template <[^>]*>\s*)?(?:struct|class|enum class|concept|using)\s+(\w+)", re.MULTILINE)


@dataclasses.dataclass
class Section:
    """A group of declarations with one comment."""

    comment: str
    code: str

    @property
    def types(self) -> list[str]:
        """The types that it declares."""
        return TYPE.findall(self.code)

    @property
    def functions(self) -> list[str]:
        """The functions that it declares outside of any type, in their order."""
        if self.types:
            return []
        found = []
        for statement in re.split(r"[;}]\s*(?://.*)?\n", without_comments(self.code) + "\n"):
            match = FUNCTION.search(statement)
            if match and "operator" not in statement:
                found.append(match.group(1))
        return list(dict.fromkeys(found))

    @property
    def methods(self) -> list[str]:
        """The public member functions of its types."""
        if not self.types:
            return []
        body = without_comments(self.code).partition("{")[2]
        statements = re.split(r"[;{}]", body)
        names = (FUNCTION.search(statement) for statement in statements if "operator" not in statement)
        return list(dict.fromkeys(match.group(1) for match in names if match))


def without_comments(code: str) -> str:
    """The code alone."""
    return re.sub(r"//.*", "", code)


def is_private(code: str) -> bool:
    """True of what is in the header for the compiler only."""
    return bool(re.match(r"#|extern template|HEADWAY_ELEMENT|struct \w+;", code))


def sections_of(header: str) -> tuple[str, list[Section]]:
    """The header's introduction, and its sections."""
    introduction, _, rest = header.partition("#pragma once")
    body = NAMESPACE.sub("", rest.partition("push(default)\n")[2]).partition("}  // namespace headway")[0]
    body = re.sub(r"#define.*?#undef \w+\n", "", body, flags=re.DOTALL)
    body = re.sub(r"^namespace \w+ \{\n+|^\}  // namespace \w+\n+", "", body, flags=re.MULTILINE)  # masks::
    sections = []
    for block in re.split(r"\n\n(?=\S)", body.strip("\n")):
        for part in parts_of(block):
            comment, code = split_comment(part)
            code = re.sub(r"\n+ private:\n.*?(?=\n\};)", "", code, flags=re.DOTALL)
            if code.strip() and not is_private(code):
                sections.append(Section(comment, code.rstrip("\n")))
    return uncommented(introduction), sections


def parts_of(block: str) -> list[str]:
    """A block may hold several comments at its left margin, each with the declarations below it, and several types."""
    parts: list[list[str]] = [[]]
    for line in block.splitlines():
        last = parts[-1][-1] if parts[-1] else "//"
        if (line.startswith("//") and not last.startswith("//")) or last == "};" or last.startswith("using "):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part) for part in parts]


def split_comment(part: str) -> tuple[str, str]:
    """The comment above a declaration, as text, and the declaration."""
    lines = part.splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))
    return uncommented("\n".join(lines[:count])), "\n".join(lines[count:])


def uncommented(comment: str) -> str:
    """Its text as Markdown: indented lines of a comment are formulas."""
    lines = [re.sub(r"^// ?", "", line) for line in comment.strip().splitlines()]
    text = ""
    for line, previous in zip(lines, ["", *lines]):
        indented = line.startswith("  ")
        if indented != previous.startswith("  ") and text:
            text += "\n"
        text += ("    " + line.strip() if indented else re.sub(r"([<>*])", r"\\\1", line)) + "\n"
    return text.strip("\n")


def examples_of(path: pathlib.Path) -> dict[str, str]:
    """The bodies of the functions example_NAME in a file, by NAME."""
    if not path.exists():
        return {}
    text = path.read_text()
    found = dict(re.findall(r"^void example_(\w+)\(\) \{\n(.*?)^\}$", text, re.MULTILINE | re.DOTALL))
    found |= dict(re.findall(r"^void example_(\w+)\(\) \{ (.*) \}(?:  //.*)?$", text, re.MULTILINE))
    for name, tail in re.findall(r"^void example_(\w+)\(\) \{ .* \}(  //.*)$", text, re.MULTILINE):
        found[name] += tail
    return {name: re.sub(r"^  ", "", body, flags=re.MULTILINE).rstrip("\n") for name, body in found.items()}


def page_of(root: pathlib.Path, name: str) -> str:
    """The Markdown page of include/headway/NAME.h."""
    introduction, sections = sections_of((root / f"include/headway/{name}.h").read_text())
    examples = examples_of(root / f"examples/reference/{name}.cpp")
    text = (
        f"# headway/{name}.h\n\n{introduction}\n\n```cpp\n#include <headway/{name}.h>  // or <headway/headway.h>\n```\n"
    )
    used: set[str] = set()
    for section in sections:
        text += section_text(section, examples, used)
    assert used == set(examples), f"{name}: examples of nothing in the header: {set(examples) - used}"
    return text


def section_text(section: Section, examples: dict[str, str], used: set[str]) -> str:
    """One section; an example that several of its names share stands there once."""
    names = section.types or section.functions
    text = f"\n## {', '.join(names)}\n" if names else ""
    if section.comment:
        text += f"\n{section.comment}\n"
    text += f"\n```cpp\n{section.code}\n```\n"
    bodies = [examples[name] for name in names if name in examples and name not in used]
    used.update(name for name in names if name in examples)
    return text + "".join(f"\nExample:\n\n```cpp\n{body}\n```\n" for body in bodies)


def headers(root: pathlib.Path) -> list[str]:
    """The public headers that declare something, in the order of the alphabet."""
    found = [path for path in (root / "include/headway").glob("*.h") if sections_of(path.read_text())[1]]
    return sorted(path.stem for path in found if path.stem != "mpi")  # distributed.h over MPI: docs/distributed.md
