"""What MkDocs does for this site: pages that lie elsewhere in the repository, pages that are made, and links."""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import headers

ROOT = pathlib.Path(__file__).parents[2]
FROM_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\(|<img src=\")([^)\s#\"]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the README and its neighbours, a page for each C++ header, and the benchmarks' pictures and numbers."""
    for source, target in FROM_THE_TOP.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for name in headers.headers(ROOT):
        files.append(File.generated(config, f"reference/cpp/{name}.md", content=headers.page_of(ROOT, name)))
    for path in (ROOT / "benchmarks/results").iterdir():
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages, or to the repository."""
    at_the_top = page.file.src_uri in FROM_THE_TOP.values()
    return LINK.sub(lambda link: link.group(1) + target_of(link.group(2), at_the_top, config.repo_url), markdown)


def target_of(link: str, at_the_top: bool, repository: str) -> str:
    """Where a link of a page leads on the site; pages that links are rewritten in lie in the top folder."""
    if ":" in link or link.startswith("/"):
        return link
    if not at_the_top and not link.startswith("../"):
        return link
    path = link.removeprefix("../")
    if path in FROM_THE_TOP:
        return FROM_THE_TOP[path]
    if path == "include/headway":
        return "reference/cpp/attention.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/results/"):
        return path.removeprefix("benchmarks/")
    return f"{repository.rstrip('/')}/blob/main/{path}"
