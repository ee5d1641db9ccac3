"""What ./dev demo shows: five documents as they say, a map of one head, and the pages, on one screen."""

import os
import re
import subprocess

from script import arguments, fail


def main():
    args = arguments()
    pages = args.scratch / "demo"
    result = subprocess.run(
        [args.source / "examples/demo.sh", args.build / "examples", pages],
        env=dict(os.environ, PYTHON="false", LC_ALL="C.UTF-8", NO_COLOR="1"),
        text=True,
        capture_output=True,
    )
    lines = result.stdout.splitlines()
    documents = [line for line in lines if re.match(r"00[0-4]  .* yes, to \d", line)]
    without_its_code = [line for line in documents if re.search(r"\d us +- +.*s +-$", line)]
    head = [line for line in lines if re.match(r" +it .*█████", line)]
    checks = {
        "exit status 0": result.returncode == 0,
        "five documents": len(documents) == 5,
        "no time for code that cannot run": len(without_its_code) == 5,
        "a map of fifteen words": len([line for line in lines if "░" in line or "█" in line]) == 15,
        "what one word looks at": len(head) == 1 and '"it" looks at animal 69 %, [CLS] 10 %, it 6 %' in lines,
        "one screen": len(lines) <= 32 and max(len(line) for line in lines if ".html" not in line) <= 120,
        "pages": all("tired" in (pages / name).read_text() for name in ("attention.html", "trace.html"))
        or any(line.startswith("no pages: ") for line in lines),
    }
    shown = re.search(
        r"^\$ ./dev demo\n(.*?)^```", (args.source / "docs/demo.md").read_text(), re.DOTALL | re.MULTILINE
    )
    checks["what docs/demo.md shows"] = shown and comparable(shown.group(1)) == comparable(result.stdout)
    missing = [what for what, found in checks.items() if not found]
    if missing:
        fail(f"expected {', '.join(missing)}; found\n{result.stdout}{result.stderr}")


def comparable(text):
    """Its lines, without times, differences and where the pages are."""
    return [line.split(", to ")[0] for line in text.splitlines() if ".html" not in line]


main()
