"""Starts an installed `meshscope serve` and asks for what a browser would: list, page, bundle.

python check_serve.py COMMAND FOLDER    # standard library only; fails where something is missing
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()


def check(base: str) -> None:
    rows = json.loads(get(f"{base}api/v1/runs"))["runs"]
    run = next(row["id"] for row in rows if row["state"] == "finished")
    page = get(f"{base}run/{run}").decode()
    for asset in re.findall(r'(?:src|href)="\.\./(assets/[^"]+)"', page):
        if len(get(f"{base}{asset}")) < 1000:
            raise SystemExit(f"{asset} is empty")
    document = json.loads(get(f"{base}api/v1/runs/{run}/page"))
    if document["document"] != "meshscope-page" or not document["report"]["steps"]["num_steps"]:
        raise SystemExit("the page has no steps")
    if b"meshscope-page" not in get(base):
        raise SystemExit("the list of runs has no place to draw in")


def main() -> None:
    command, folder = sys.argv[1:]
    server = subprocess.Popen(
        [command, "serve", folder, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        check(server.stdout.readline().strip())
    finally:
        server.terminate()
        server.wait(30)
    node = "with node at hand" if shutil.which("node") else "without node"
    sys.stdout.write(f"serves its page, {node}\n")


main()
