import csv
import math
import random
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from drafters import CTC, DraftTree, recipe
from drafters.losses import anchors
from drafters.protocol import Limits
from train.callbacks import training_speed
from train.callbacks.training_speed import Optimisation, Speed, count_anchors
from train.callbacks.tree_samples import choose_roots, draw_trees
from train.cli import lightning_command
from train.metrics import conditional
from train.validation.tree_text import tree_text, word

SEEN = {
    *("train/loss", "train/blank_share", "train/tokens_per_second", "train/anchors_per_second", "train/utilisation"),
    *("train/learning_rate", "train/gradient_norm", "val/loss", "val/acceptance_length"),
    *(f"val/accepted_{depth}_or_more" for depth in range(1, 9)),
    *(f"val/accepted_{depth}_given_{depth - 1}" for depth in range(1, 9)),
}


@pytest.fixture(scope="module")
def watched(write_recipe, tmp_path_factory):
    """The tiny training with two loggers, printed draft trees, and no callbacks of ours in its config."""
    runs = tmp_path_factory.mktemp("watched")
    loggers = [
        {"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": str(runs), "name": name}}
        for name in ("TensorBoardLogger", "CSVLogger")
    ]
    config = write_recipe(runs, logger=loggers, log_every_n_steps=2, callbacks=None, gradient_clip_val=1e-3)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr("sys.argv", ["pytest"])
        lightning_command.main(["fit", "--config", str(config), "--trees.is_printed", "true", "--trees.num_roots", "3"])
    return runs, printed.getvalue()


@pytest.mark.slow
def test_every_run_logs_speed_acceptance_by_depth_and_gradient_norms(watched):
    with (watched[0] / "CSVLogger" / "version_0" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert rows[0].keys() >= SEEN
    for name in SEEN:
        values = [float(row[name]) for row in rows if row[name]]
        assert len(values) == (4 if name.startswith("train") else 2) and all(map(math.isfinite, values)), name
    at = {name: [float(row[name]) for row in rows if row[name]] for name in SEEN}
    assert at["train/learning_rate"] == pytest.approx([0.01] * 4)
    assert min(at["train/gradient_norm"]) > 1e-3, "the norm is that before clipping"
    assert all(0 < share <= 1 for share in at["train/utilisation"])
    for row in range(2):
        product = 1.0
        for depth in range(1, 9):
            product *= at[f"val/accepted_{depth}_given_{depth - 1}"][row]
            assert product == pytest.approx(at[f"val/accepted_{depth}_or_more"][row])


def test_draft_trees_of_each_validation_go_to_every_logger_and_are_printed_on_request(watched):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(watched[0] / "TensorBoardLogger" / "version_0"), size_guidance={"tensors": 0})
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SEEN
    samples = events.Tensors("val/trees/text_summary")
    assert [sample.step for sample in samples] == [4, 8]
    for sample in samples:
        text = sample.tensor_proto.string_val[0].decode()
        assert text.count("```") == 6 and text.count(" accepted of ") == 3 and "─" in text
        beside = watched[0] / "CSVLogger" / "version_0" / "val" / "trees" / f"{sample.step}.md"
        assert beside.read_text() == text + "\n"
    assert watched[1].count("draft trees at step") == 2 and watched[1].count(" accepted of ") == 6


def test_conditional_shares_multiply_to_the_shares_by_depth():
    assert conditional([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]
    assert conditional([]) == []


@pytest.mark.parametrize("most", [1, 5, 100, 0])
def test_the_anchor_count_equals_the_number_of_sampled_anchors(most):
    mask = torch.rand(6, 20, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 6)[:, None]
    _, kept = anchors.sample(mask, most or mask.shape[1])
    assert int(count_anchors(mask, most)) == int(kept.sum())


class Line(L.LightningModule):
    """y = w x with the squared error from 3 as its loss."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        self.norms = []

    def training_step(self, batch, batch_idx):
        loss = (batch @ self.weight - 3).square().mean()
        self.norms.append(torch.autograd.grad(loss, self.weight, retain_graph=True)[0].norm().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_gradient_norm_is_that_of_the_full_gradient_before_clipping():
    logged = []

    class Reads(L.Callback):
        def on_train_batch_end(self, trainer, *given):
            logged.append(trainer.callback_metrics["train/gradient_norm"].item())

    rows = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    module = Line()
    L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1},
        gradient_clip_val=1e-3,
        callbacks=[Optimisation(), Reads()],
    ).fit(module, DataLoader(rows, batch_size=None))
    assert logged == pytest.approx(module.norms) and min(logged) > 1e-3


def test_speed_counts_tokens_without_padding_and_time_without_validation(monkeypatch):
    """Two steps of 3 s after 1 s of waiting each, with a validation of 100 s between them."""
    clock = iter([1.0, 4.0, 104.0, 105.0, 108.0, 108.0])
    monkeypatch.setattr(training_speed.time, "perf_counter", lambda: next(clock))
    logged = {}
    drafter = SimpleNamespace(num_anchors=4)
    module = SimpleNamespace(
        device=torch.device("cpu"), drafter=drafter, log_dict=lambda values, **how: logged.update(values)
    )
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=2)
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 3:10] = mask[1, 4:6] = True
    batch = {"lengths": torch.tensor([10, 6]), "loss_mask": mask}
    speed = Speed()
    speed.on_train_start(trainer, module)
    for step in (1, 2):
        speed.on_train_batch_start(trainer, module, batch, 0)
        trainer.global_step = step
        speed.on_train_batch_end(trainer, module, None, batch, 0)
        assert bool(logged) == (step == 2)
        if step == 1:
            speed.on_validation_start(trainer, module)
            speed.on_validation_end(trainer, module)
    assert logged["train/tokens_per_second"] == pytest.approx(2 * 16 / 7)
    assert logged["train/anchors_per_second"] == pytest.approx(2 * (4 + 2) / 7)
    assert logged["train/utilisation"] == pytest.approx(6 / 7)


def test_a_tree_is_drawn_from_the_root_to_the_right():
    tree = DraftTree([1, 2, 3, 4, 5, 6], [-1, 0, -1, 0, 2, 2], probabilities=[0.6, 0.4, 0.2, 0.1, 0.05, 0.04])
    drawn = tree_text(tree, "the", ["cat", "sat", "dog", "ran", "was", "is"], [0, 1])
    assert drawn.plain.splitlines() == [
        "the ─┬─ cat 0.60 ✓ ─┬─ sat 0.40 ✓",
        "     │              └─ ran 0.10",
        "     └─ dog 0.20 ─┬─ was 0.05",
        "                  └─ is 0.04",
    ]
    console = Console(force_terminal=True, color_system="standard", width=80)
    with console.capture() as seen:
        console.print(drawn)
    assert "\x1b[1;32mcat 0.60 ✓\x1b[0m" in seen.get() and "\x1b[90mdog 0.20\x1b[0m" in seen.get()


def test_a_chain_is_one_line_an_empty_tree_is_its_root_and_wide_characters_keep_the_columns():
    assert tree_text(DraftTree([1, 2], [-1, 0]), "the", ["cat", "sat"], []).plain == "the ─── cat ─── sat"
    assert tree_text(DraftTree(), "the", [], []).plain == "the"
    lines = tree_text(DraftTree([1, 2], [-1, -1]), "猫", ["a", "b"], []).plain.splitlines()
    assert lines == ["猫 ─┬─ a", "    └─ b"]


@pytest.mark.parametrize("seed", range(20))
def test_every_node_of_a_tree_is_drawn_once_behind_its_parent(seed):
    rng = random.Random(seed)
    parents = [rng.randrange(-1, node) for node in range(rng.randrange(1, 30))]
    words = [f"w{node}." for node in range(len(parents))]
    lines = tree_text(DraftTree(range(len(parents)), parents), "root", words, [], num_nodes=99).plain.splitlines()
    places = {name: (row, line.index(name)) for row, line in enumerate(lines) for name in words if name in line}
    assert "".join(lines).count(".") == len(parents) == len(places)
    for node, parent in enumerate(parents):
        row, column = places[words[node]]
        above, end = (0, len("root")) if parent < 0 else places[words[parent]]
        end += len(words[parent]) if parent >= 0 else 0
        assert row >= above and column == end + 5


def test_a_large_tree_is_drawn_with_its_first_and_its_accepted_nodes():
    drawn = tree_text(DraftTree(range(9), [-1] * 9), "r", [f"w{node}" for node in range(9)], [7], num_nodes=2).plain
    assert [name for name in (f"w{node}" for node in range(9)) if name in drawn] == ["w0", "w1", "w7"]
    assert drawn.splitlines()[-1] == "and 6 nodes more"


def test_drawings_show_the_text_the_tree_and_what_is_accepted(tiny_base):
    torch.manual_seed(1)
    drafter = recipe.build(
        CTC, tiny_base.shape, {"num_frames": 4, "num_labels": 3, "num_nodes": 200, "top_k": 40}
    ).eval()
    text = torch.randint(3, 400, (40,), generator=torch.Generator().manual_seed(0))
    hidden = tiny_base.hidden_states(text[None], (-1,))[0][0]
    roots = choose_roots((10, 40), 6)
    assert roots == [10, 14, 19, 24, 29, 34] and choose_roots((10, 12), 6) == [10] and choose_roots((10, 11), 6) == []
    drawn = draw_trees(drafter, tiny_base, hidden, text, (10, 40), 6)
    limits = Limits(max_depth=30, eos=tiny_base.eos)
    trees = drafter.draft_at(hidden, text, torch.tensor(roots), tiny_base.base_weights, limits)
    counts = [len(tree.follow(text[root + 1 :].tolist())) for root, tree in zip(roots, trees, strict=True)]
    assert sum(counts) > 0
    for drawing, root, count in zip(drawn, roots, counts, strict=True):
        lines = drawing.plain.splitlines()
        follows = word(tiny_base.tokenizer, int(text[root + 1 + count]))
        assert lines[-1] == f"{count} accepted of 200, then {follows}"
        assert drawing.plain.count("✓") == count and "and " in lines[-2]


def test_a_token_is_drawn_on_one_line(tiny_base):
    tokenizer = tiny_base.tokenizer
    shown = {word(tokenizer, token) for token in range(len(tokenizer))}
    assert all(name and name.isprintable() and " " not in name for name in shown)
    assert {"▁the", "⏎"} <= shown
