"""Which local folder a model's or tokenizer's name means, as far as that is known without fetching anything.

Called by the supervisor, which has the others fetched, and by `check`, which does not.
"""

import os
from pathlib import Path

from common.config import ModelOptions
from common.errors import ConfigError
from common.model_cache import is_hub_id, ready_model_dir


def folder_at_hand(option: str, name: str) -> str:
    """The folder that an option names if it is there now; empty if `worker_proc.fetch_model` has to make it.

    Raises:
        ConfigError: a path to nothing, or as `ready_model_dir`.
    """
    if folder := ready_model_dir(name):
        return str(folder)
    a_path = name.startswith(("/", ".", "~")) or name.endswith(".gguf")
    if a_path and not (name.endswith(".gguf") and Path(name).expanduser().is_file()):
        raise ConfigError(f"{option} {name}: no such folder or .gguf file")
    return ""


def check_model_folder(name: str, folder: str) -> None:
    """Refuse a folder without a configuration before anything is started on it; raises ConfigError."""
    if not os.access(Path(folder) / "config.json", os.R_OK):
        raise ConfigError(f"--model {name}: no readable config.json in {folder}, so it is no model folder")


def objections(options: ModelOptions) -> list[str]:
    """What to tell of model and tokenizer, fetching nothing, to someone whose start has failed for another reason."""
    found = []
    for option, name in (("--model", options.model), ("--tokenizer", options.tokenizer)):
        try:
            folder = folder_at_hand(option, name) if name else ""
            if folder and option == "--model":
                check_model_folder(name, folder)
            elif name and not folder and is_hub_id(name):
                found.append(f"{option} {name}: there is no such folder here, so that it would be fetched from the hub")
        except ConfigError as error:
            found.append(str(error))
    return found
