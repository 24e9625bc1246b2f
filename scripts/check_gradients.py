"""Checks every law by hand, by autodiff and by central differences; exit code 1 if not.

python scripts/check_gradients.py --config=configs/gradients.py[:VARIANT]
    [--workdir=DIR] [--config.NAME=VALUE ...]
"""

import sys
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from jaxattn import command, proof, runs
from jaxattn import config as config_lib

_CONFIG = flags.DEFINE_string("config", None, "a config file, with :VARIANT behind it")
_WORKDIR = flags.DEFINE_string("workdir", None, "default results/<config>[-variant]")


def main(overrides: list[tuple[str, str]]) -> int:
    """Runs; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX tells which backends it lacks
    try:
        config = command.read_config(
            _CONFIG.value, overrides, config_lib.check_proof, "configs/gradients.py"
        )
        workdir = Path(_WORKDIR.value or Path("results") / config.name)
        with (
            runs.claimed(workdir, config),
            tqdm(total=proof.work(config), unit="pass", dynamic_ncols=True) as bar,
        ):

            def progress(what: str, done: int) -> None:
                bar.set_description(what, refresh=False)
                bar.update(done)

            summary = proof.prove(config, progress)
            bar.close()
            text = proof.terminal(summary)
            print(text)
            with runs.staged(workdir) as stage:
                runs.write_config(stage, config)
                (stage / "report.txt").write_text(text, "utf-8")
                runs.write_summary(stage, summary)
    except (config_lib.ConfigError, runs.RunError) as error:
        command.stop(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"Written to {workdir}: summary.json, report.txt, config.json")
    return 0 if summary["holds"] else 1


if __name__ == "__main__":
    app.run(lambda overrides: sys.exit(main(overrides)), flags_parser=command.split)
