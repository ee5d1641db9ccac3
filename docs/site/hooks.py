"""What MkDocs does for this site: pages that lie elsewhere in the repository, pages that are made, and links."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import headers
import names

ROOT = pathlib.Path(__file__).parents[2]
FROM_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\(|<img src=\")([^)\s#\"]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the README and its neighbours, a page for each C++ header, and what pages link to outside of docs/."""
    for source, target in FROM_THE_TOP.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for name in headers.headers(ROOT):
        files.append(File.generated(config, f"reference/cpp/{name}.md", content=headers.page_of(ROOT, name)))
    for path in sorted(linked_sources()):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def linked_sources() -> set[str]:
    """Files of the repository that are no pages: programs, pictures and tables of benchmarks, the license."""
    pages = [ROOT / name for name in FROM_THE_TOP] + [*(ROOT / "docs").glob("*.md")]
    links = {link for page in pages for _, link in LINK.findall(page.read_text())}
    paths = {link.removeprefix("../") for link in links if ":" not in link}
    return {path for path in paths if path not in FROM_THE_TOP and is_outside(path) and (ROOT / path).is_file()}


def is_outside(path: str) -> bool:
    """Whether a path from the top of the repository leads outside of docs/."""
    return not path.startswith("docs/") and not (ROOT / "docs" / path).exists()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links inside the site."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder == "reference":
        return names.with_every_name(name, markdown)
    if folder:
        return markdown  # links to pages only
    at_the_top = page.file.src_uri in FROM_THE_TOP.values()
    return LINK.sub(lambda link: link.group(1) + target_of(link.group(2), at_the_top), markdown)


def target_of(link: str, at_the_top: bool) -> str:
    """Where a link of a page in docs/, or at the top of the repository, leads on the site."""
    if ":" in link or not (at_the_top or link.startswith("../")):
        return link
    path = link.removeprefix("../")
    if path in FROM_THE_TOP:
        return FROM_THE_TOP[path]
    if path == "include/headway":
        return "reference/cpp/attention.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}"
