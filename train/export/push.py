"""``drafters push``: put an exported drafter on the Hugging Face hub, with a card of what was measured."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import check_files, escape_markdown, safe_line, yaml_line
from data.hub import reason_of, split_revision
from data.shipped import find_base
from drafters import checkpoint
from drafters.checkpoint import DrafterConfig
from drafters.parallel import ParallelDrafter
from drafters.registry import registered
from inference import drafter_specs
from inference.fingerprint import fingerprint
from inference.reporting.tables import COUNTING_RULE
from inference.results import folders
from inference.results.conditions import LENGTH_CAP, drafter_fingerprint
from inference.results.folders import EvaluationResults
from inference.results.metrics import Summary
from inference.vllm import own_methods

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
HARDWARE_KEYS = "device", "dtype", "decoding", LENGTH_CAP, "template", "versions", "date", "command"


def push(
    folder: str,
    repository: str,
    results: list[str] | None = None,
    license: str | None = None,
    public: bool = False,
    dry_run: bool = False,
) -> None:
    """Put an exported drafter on the Hugging Face hub.

    A new repository is private unless --public is given; one that exists stays as it is. Only config.json,
    model.safetensors, SHA256SUMS and README.md go up. Others then name the drafter as OWNER/NAME@REVISION wherever a
    folder is expected, such as in `drafters eval --drafter ctc=OWNER/NAME@REVISION`.

    Args:
        folder: Folder that `drafters export` wrote.
        repository: Repository of the hub, as OWNER/NAME.
        results: Folders that `drafters eval --out` wrote; the card shows what they measured for this drafter.
        license: Licence of the drafter for the card, such as apache-2.0. The base's licence may bind it too.
        public: Make a new repository public.
        dry_run: Show the files and the card, and upload nothing.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(f"{repository!r} is no repository of the hub: write OWNER/NAME")
    source = Path(folder)
    if own_methods.spec_of_folder(source):
        raise ValueError(f"{source} is in vLLM's format: push the folder written without --format vllm")
    config = checkpoint.read_config(source)
    check_files(source)
    files = [source / name for name in checkpoint.FILES if (source / name).is_file()]
    if source / "model.safetensors" not in files:
        raise ValueError(f"{source} holds no model.safetensors: export the drafter again")
    name = drafter_specs.name_of(config)
    card = card_for_hub(source, config, repository, [folders.read(each) for each in results or ()], license)
    for file in files:
        size = len(card.encode()) if file.name == "README.md" else file.stat().st_size
        print(f"{size:>12,} bytes  {file.name}")
    if dry_run:
        print(f"\n{card}\nnothing was uploaded: leave out --dry_run to upload to {repository}")
        return
    with tempfile.TemporaryDirectory() as place:
        for file in files:
            shutil.copyfile(file, Path(place) / file.name)
        (Path(place) / "README.md").write_text(card, encoding="utf-8")
        commit = _upload(Path(place), repository, public)
    print(f"uploaded to {repository}; use it as\n  --drafter {name}={repository}@{commit}")


def _upload(folder: Path, repository: str, public: bool) -> str:
    """Upload the files of a folder in one commit; return its id.

    Raises:
        ValueError: The hub cannot be reached, nobody is logged in, or the repository may not be written.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ValueError("nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:
        created = api.create_repo(repository, private=not public, exist_ok=True)
        print(f"uploading to {created}", file=sys.stderr)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a drafter",
            allow_patterns=list(checkpoint.FILES),
        )
    except Exception as error:  # the hub client's own errors, and those of its HTTP client
        raise ValueError(f"cannot upload to {repository}: {safe_line(reason_of(error))}") from error
    return commit.oid


def card_for_hub(
    folder: Path,
    config: DrafterConfig,
    repository: str,
    measured: Sequence[EvaluationResults] = (),
    license: str | None = None,
) -> str:
    """The model card: the exported README, with the repository's name, a licence, and what was measured.

    Args:
        folder: Folder of the drafter.
        config: Its configuration.
        repository: OWNER/NAME.
        measured: Evaluations of this drafter.
        license: Licence for the header.

    Raises:
        ValueError: README.md is missing, or an evaluation does not hold this drafter.
    """
    path = folder / "README.md"
    if not path.is_file():
        raise ValueError(f"{folder} holds no README.md, the model card: export the drafter again")
    name, spec = drafter_specs.name_of(config), f"{repository}@REVISION"
    card = path.read_text(encoding="utf-8").replace("THIS_FOLDER", spec)
    base, _ = split_revision(config.base_name)
    is_of_hub = REPOSITORY.fullmatch(base) and not Path(find_base(config.base_name)).exists()
    line = f"{yaml_line('base_model', base)}\n" if is_of_hub else ""  # the hub refuses folders and revisions there
    card = card.replace(f"{yaml_line('base_model', config.base_name)}\n", line, 1)
    if license:
        if not card.startswith("---\n"):
            raise ValueError(f"{path} has no header between lines of ---, where the licence goes: export it again")
        card = f"---\n{yaml_line('license', license)}\n{card[4:]}"
    drafter_class = registered()[name].learned_class
    if drafter_class and issubclass(drafter_class, ParallelDrafter):
        served = f"Serve it with vLLM: `drafters serve-command {spec}` prints the command."
    else:
        served = f"Serve it: `drafters serve --base BASE --drafter {name}={spec}`."
    parts = [
        card.rstrip(),
        f"{served} REVISION is a commit of this repository, so that results can be repeated.",
        *(_measured_section(each, name, fingerprint(folder)) for each in measured),
    ]
    return "\n\n".join(parts) + "\n"


def _measured_section(results: EvaluationResults, name: str, own: str) -> str:
    """What an evaluation measured for drafters of this kind, unless their files are known to be others than ``own``."""
    chosen = {
        benchmark: {label: summary for label, summary in by_drafter.items() if _is_named(label, name)}
        for benchmark, by_drafter in results.summaries.items()
    }
    if not any(chosen.values()):
        found = ", ".join(dict.fromkeys(label for each in results.summaries.values() for label in each))
        raise ValueError(
            f"{results.name} holds no results of {name}, but of {found}: give an evaluation of this drafter"
        )
    prints = {
        label: drafter_fingerprint(
            results.context, label.partition(" @ ")[0]
        )  # without the requests at once of a server
        for by_drafter in chosen.values()
        for label in by_drafter
    }
    others = [label for label, its in prints.items() if its not in ("", own)]
    if len(others) == len(prints):
        raise ValueError(
            f"{results.name} measured {', '.join(others)} from other files than this folder's: evaluate the drafter "
            "again, or leave out --results"
        )
    rows = [
        _row(benchmark, label, summary)
        for benchmark, by_drafter in chosen.items()
        for label, summary in by_drafter.items()
        if label not in others
    ]
    context: Mapping[str, Any] = results.context
    told = [f"- {key}: {escape_markdown(context[key])}" for key in HARDWARE_KEYS if key in context]
    if "" in prints.values():
        told.append(f"- drafter: one named {name}; the results do not say which files it was read from")
    header = [
        f"## Measured with {escape_markdown(context.get('base', 'its base'))}",
        "\n".join(
            [
                "| benchmark | drafter | acceptance length | accepted at position 1, 2, ... | speed-up | identical |",
                "| --- | --- | ---: | --- | ---: | ---: |",
                *rows,
            ]
        ),
        "\n".join([*told, f"- counting: {COUNTING_RULE}"]),
    ]
    return "\n\n".join(header)


def _is_named(label: str, name: str) -> bool:
    return re.split("[:= ]", label, maxsplit=1)[0] == name


def _row(benchmark: str, label: str, summary: Summary) -> str:
    length = "" if summary.acceptance_length is None else f"{summary.acceptance_length:.2f}"
    positions = ", ".join(f"{share:.2f}" for share in summary.acceptance_by_depth)
    speedup = "" if summary.wall_speedup is None else f"{summary.wall_speedup:.2f}× (wall time)"
    speedup = speedup if summary.speedup is None else f"{summary.speedup:.2f}×"
    cells = [benchmark, label, length, positions, speedup, f"{summary.identical}/{summary.questions}"]
    return f"| {' | '.join(map(escape_markdown, cells))} |"
