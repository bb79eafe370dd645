import os
from pathlib import Path

import pytest

import meshscope

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # environments of other targets (browser, frameworks, notebook) are without it
else:
    # A deadline measures the machine, not the code: its cores are shared.
    settings.register_profile("meshscope", deadline=None)
    settings.load_profile("meshscope")

USERS_VARIABLES = {
    "CLICOLOR", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",
    "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONSAFEPATH", "PYTHONUTF8", "PYTHONWARNINGS", "TERM",
}  # fmt: skip
USERS_PREFIXES = ("GLOO_", "MESHSCOPE_", "OMPI_", "PMI", "SLURM_", "TORCH", "XDG_")


def forget_the_user() -> None:
    """Takes out of the environment what would change a result; processes import this tree."""
    for name in list(os.environ):
        if name in USERS_VARIABLES or name.startswith(USERS_PREFIXES):
            del os.environ[name]
    os.environ["PYTHONPATH"] = str(Path(meshscope.__file__).parents[1])
    # Workers and ranks fill the cores already. Threads of torch beside them spin while they wait
    # for each other: tests of the engine took four times the processor time with two.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Beside other load a command takes seconds, and would say so on stderr.
    os.environ["MESHSCOPE_SILENT_S"] = "3600"


# Before test modules are imported: some of them copy the environment.
forget_the_user()


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
        assert text == path.read_text(encoding="utf-8"), (
            f"tests/golden/{name} looks different; if it should, run pytest with --update-golden, "
            "and read the diff"
        )

    return compare
