from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite golden files under tests/golden; read the diff before committing it",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares a text with a file under tests/golden, or rewrites the file when asked to."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; run pytest --update-golden and read it"
        assert text == path.read_text(encoding="utf-8")

    return compare
