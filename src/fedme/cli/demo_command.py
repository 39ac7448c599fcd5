"""The demo: three methods on the bundled digits, in half a minute."""

from fedme.cli.app import Quiet, app, err, out
from fedme.cli.result_commands import compare
from fedme.config.experiment import load
from fedme.running import run
from fedme.running.progress import Display

DEMO = ("digits-local", "digits-fedavg", "digits-fedme")


@app.command()
def demo(quiet: Quiet = False) -> None:
    """FedMe with four architectures against Local and FedAvg, with and without fine-tuning, on the bundled digits."""
    folders = []
    for name in DEMO:
        experiment, _ = load(name)
        with Display(err, quiet) as display:
            display.note(f"{name} ({list(DEMO).index(name) + 1} of {len(DEMO)})")
            folders.append(run.start(experiment, display))
    compare(folders, "table", "test", False, False)
    out.print(f"The runs are in {', '.join(str(folder) for folder in folders)}; `fedme show` looks into one.")
