"""`plan --fits` answers on a login node, where torch is not installed."""

import subprocess
import sys

PROGRAM = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Refuse())
from meshscope.cli import main
main(sys.argv[1:])
"""


def test_it_fits_without_torch(tmp_path):
    config = tmp_path / "train.toml"
    config.write_text(
        '[model]\npreset = "gpt2-small"\n[parallel]\ndp = 2\npp = 2\ndata_parallel = "fsdp"\n'
        '[batch]\nnum_microbatches = 4\n[[faults]]\nkind = "slow"\nrank = 1\nms = 20\n'
    )
    asked = ["plan", "--fits", str(config), "--device", "H100-80GB"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *asked], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It fits")
