"""`python -m tests.integrations.families --write`: the table of docs/models.md.

Builds a small model of every family of transformers that reads tokens, and compares loss and gradients with
transformers' eager attention: in one process, on two ranks, and on two ranks with packed documents. Each
family runs in a separate process.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto import modeling_auto

from tests.multiprocess import ranks
from tritoncp.core.processes import Lost, WorkerPool
from tritoncp.integrations.transformers import register, shard_batch

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
HEADS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
NULLABLE = ("pad_token_id", "head_dim", "sliding_window")
LIMIT, SECONDS = 1e-4, 150
LENGTH, VOCABULARY = 64, 97
DOCUMENTS = (23, 7, 34)  # lengths of the packed documents of a row
TABLE = tomllib.loads(Path(__file__).with_name("family_sizes.toml").read_text())
SIZES: dict[str, Any] = {name: value for value, *names in TABLE["sizes"] for name in names}
VARIANTS: list[dict[str, Any]] = [
    {name: None if value == "none" else value for name, value in sizes.items()} for sizes in TABLE["variants"]
]
CLASSES: dict[str, str] = TABLE["classes"]
register()
NOT_TRIED = "not tried: "
MOST_WEIGHTS = 20_000_000


def options_of(family: str) -> dict[str, Any]:
    """Return further values of a config that a family needs."""
    options = TABLE["options"].get(family, {})
    return TABLE["options"][options] if isinstance(options, str) else options


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


# Inputs of two rows besides tokens and labels, or in place of them.
IMAGE = {"pixel_values": _normal(2, 3, 16, 16)}
CODES = {"input_ids": _tokens(8, LENGTH), "labels": _tokens(2, LENGTH, 4)}
INPUTS: dict[str, dict[str, Any]] = {
    "blip": IMAGE,
    "git": IMAGE,
    "idefics": {"pixel_values": _normal(2, 1, 3, 16, 16), "image_attention_mask": torch.ones(2, LENGTH, 1)},
    "kyutai_speech_to_text": {"input_ids": _tokens(2, LENGTH, 3)},
    "kosmos-2": {**IMAGE, "image_embeds_position_mask": (torch.arange(LENGTH) < 4).expand(2, -1)},
    "molmo2": {"mm_token_type_ids": torch.zeros(2, LENGTH, dtype=torch.int64)},
    "musicgen": CODES,
    "musicgen_melody": CODES,
    "udop": {"bbox": torch.zeros(2, LENGTH, 4)},
    "voxtral_realtime": {"input_features": _normal(2, 128, 8 * LENGTH)},
}


class Row(NamedTuple):
    """The result of one family: "yes", or a message."""

    family: str
    one: str
    ranks: str
    packed: str


class LowerPositionsFirst(TorchFunctionMode):
    """Lets topk take the lower index of equal values, as `tritoncp.select_keys` does; torch takes any."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (torch.topk, Tensor.topk):
            return function(*args, **(kwargs or {}))
        return self.topk(*args, **(kwargs or {}))

    def topk(self, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        order = x.sort(stable=True, dim=dim, descending=largest)
        return torch.return_types.topk([part.narrow(dim, 0, k) for part in order])


def list_families() -> dict[str, str]:
    """Return the class that is built of each family with a head over tokens, by model type."""
    heads: dict[str, str] = {}
    for mapping in HEADS:
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            heads.setdefault(family, names if isinstance(names, str) else names[0])
    return dict(sorted((heads | CLASSES).items()))


def build(
    family: str, head: str, attention: str, variant: dict[str, Any], options: dict[str, Any] | None = None
) -> Any:
    """Build the small model of a family, with fixed weights, large enough that attention matters. options:
    further values of its config; None: those of its family"""
    cls = getattr(transformers, head)
    config_class = cls.config_class or transformers.CONFIG_MAPPING[family]
    config = shrink(config_class, SIZES | variant, options_of(family) if options is None else options)
    config._attn_implementation = attention
    with torch.device("meta"):
        weights = sum(x.numel() for x in cls(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"the small model has {weights} weights")
    torch.manual_seed(0)
    model = cls(config).float()
    for x in model.parameters():
        if x.ndim > 1:
            torch.nn.init.normal_(x.data, std=x.shape[-1] ** -0.5)
    return model.train()


def shrink(cls: Any, sizes: dict[str, Any], options: dict[str, Any]) -> Any:
    """Return a config with small sizes, without dropout, and with a layer or two of each kind."""
    probe = cls()
    small = {
        name: shrink(type(part), sizes, options.get(name, {}))
        for name in cls.sub_configs
        if (part := getattr(probe, name, None))
    }
    options = {name: x for name, x in options.items() if name not in small}
    probe.allow_global_per_layer_attributes = True
    values = {
        name: attempt(partial(getattr, probe, name, None)) for name in (*vars(probe), *cls.attribute_map)
    }
    for name, value in values.items():
        size = sizes.get(name)
        if size is not None and (type(value) is type(size) or (value is None and name in NULLABLE)):
            small[name] = size
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            small[name] = 0.0
    for alias, name in cls.attribute_map.items():
        if alias in small and name in small:
            del small[alias]
    if kinds := getattr(probe, "layer_types", None):
        small["layer_types"] = list(dict.fromkeys(kinds)) * (1 if len(set(kinds)) > 1 else 2)
        small["num_hidden_layers"] = len(small["layer_types"])
    last = None
    for without in ((), ("layer_types",), cls.attribute_map, ("layer_types", *cls.attribute_map)):
        try:
            config = cls(**{name: x for name, x in small.items() if name not in without} | options)
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(config, name, None) is None:
                    setattr(config, name, SIZES[name])
            return config
        except Exception as error:
            last = last or error
    raise last


def find_variant(family: str, head: str) -> tuple[dict[str, Any], str]:
    """Return the sizes with which a model trains with eager attention, and the first error if none do."""
    first = ""
    for variant in VARIANTS:
        batch = make_batch(False, family)
        error = attempt(lambda v=variant, b=batch: bool(train(build(family, head, "eager", v), b)))
        if error is True:
            return variant, ""
        first = first or error
    return {}, first


def make_batch(packed: bool, family: str) -> dict[str, Tensor]:
    """Return tokens and labels, [2, LENGTH], of one text a row or of three documents, and the other
    inputs of a family."""
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens.clone(), **INPUTS.get(family, {})}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in DOCUMENTS]).expand(2, -1)
        batch["labels"][:, batch["position_ids"][0] == 0] = -100  # no document predicts the next one
    return batch


def train(model: Any, batch: dict[str, Any], labels: Tensor | None = None) -> dict[str, Tensor]:
    """Return the loss of a model, the model's loss or the loss of labels of the same tokens, and its
    gradients."""
    model.zero_grad()
    out = model(**batch)
    return backward(model, out.loss if labels is None else loss_of(out.logits, labels, 2 * LENGTH))


def train_alone(model: Any, batch: dict[str, Any], labels: Tensor | None) -> dict[str, Tensor]:
    """Return the same of a packed batch, by a call of the model for each document alone."""
    model.zero_grad()
    targets, count = labels, 2 * LENGTH
    if labels is None:
        targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        count = (targets != -100).sum()
    total = torch.zeros(())
    for row, tokens in itertools.product(range(2), torch.arange(LENGTH).split(DOCUMENTS)):
        names = {"input_ids", "position_ids", "mm_token_type_ids"}.intersection(batch)
        document = {name: batch[name][row, tokens][None] for name in names}
        total = total + loss_of(model(**document).logits, targets[row, tokens], count)
    return backward(model, total)


def loss_of(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    """Return the part that these labels have in the mean loss of ``count`` labels."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def backward(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Return a loss and its gradients."""
    loss.backward()
    gradients = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return {"loss": loss.detach(), **gradients}


def train_on_ranks(group: Any, family: str, head: str, variant: dict[str, Any]) -> list[Any]:
    """Return the sums over ranks of loss and gradients, for one text per row and for packed documents, and
    whether the loss equals the loss of the logits; or messages."""
    model = build(family, head, "tritoncp", variant)
    return [
        attempt(partial(sum_over_ranks, group, model, make_batch(packed, family))) for packed in (False, True)
    ]


def sum_over_ranks(group: Any, model: Any, batch: dict[str, Tensor]) -> Any:
    """Train on this rank's shard; sum over ranks."""
    labels = None
    try:
        result = train(model, shard_batch(batch, model, group, BLOCK_SIZE=16))
    except ValueError as error:
        if "omit labels" not in str(error):
            raise
        rest = {name: x for name, x in batch.items() if name != "labels"}
        local = shard_batch({**rest, "targets": batch["labels"]}, model, group, BLOCK_SIZE=16)
        labels = local.pop("targets").masked_fill(~local["context_parallel"].plan.valid, -100)
        result = train(model, local, labels)
    for name, weight in model.named_parameters():
        dist.all_reduce(result.setdefault(name, torch.zeros_like(weight)))
    dist.all_reduce(result["loss"])
    return result, labels is not None


def compare(result: Any, expected: Any) -> str:
    """Return "yes", the largest difference, relative to the largest gradient, or a message."""
    for one in (result, expected):
        if isinstance(one, str):
            return one
    result = result[0] if isinstance(result, tuple) else result
    expected = {name: x for name, x in expected.items() if x.numel()}
    largest = max(x.abs().max().item() for x in expected.values())
    zero = torch.zeros(())
    worst = max((result.get(name, zero) - x).abs().max().item() for name, x in expected.items()) / largest
    return "yes" if worst < LIMIT else f"differs by {worst:.1g}"


def check(family: str, head: str) -> Row:
    """Try a family, in this process."""
    batches = [make_batch(packed, family) for packed in (False, True)]
    packed_labels = batches[1]["labels"]
    variant, error = find_variant(family, head)
    if error:
        return Row(family, *(NOT_TRIED + error,) * 3)
    several = attempt(lambda: ranks.run(2, train_on_ranks, family, head, variant, timeout=100)[0])
    several = [several] * 2 if isinstance(several, str) else several
    labels = None
    if any(not isinstance(one, str) and one[1] for one in several):  # the loss is that of the logits
        labels = batches[0]["labels"]
        batches = [{name: x for name, x in batch.items() if name != "labels"} for batch in batches]
    with LowerPositionsFirst():
        expected = train(build(family, head, "eager", variant), batches[0], labels)
    model = attempt(lambda: build(family, head, "tritoncp", variant))
    if isinstance(model, str):
        return Row(family, model, model, model)
    one = attempt(lambda: train(model, batches[0], labels))
    documents = several[1]
    if not isinstance(documents, str):
        targets = None if labels is None else packed_labels
        with LowerPositionsFirst():
            documents = attempt(
                lambda: train_alone(build(family, head, "eager", variant), batches[1], targets)
            )
    return Row(family, compare(one, expected), compare(several[0], expected), compare(several[1], documents))


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of a call, or the message of its error."""
    try:
        return work()
    except Exception as error:
        if os.environ.get("VERBOSE"):
            traceback.print_exc()
        return message_of(error)


def message_of(error: BaseException) -> str:
    """Return an error as a cell of a table."""
    text = re.sub(r"\s+", " ", str(error)).replace("|", "/").strip()
    return f"{type(error).__name__}: {text}"[:300].rstrip()


def check_families(cases: list[tuple[str, str]]) -> Iterator[Row]:
    """Try families one after the other, without their output."""
    for family, head in cases:
        with contextlib.redirect_stdout(io.StringIO()):
            row = attempt(partial(check, family, head))
        yield Row(family, *(NOT_TRIED + row,) * 3) if isinstance(row, str) else row


def check_in_child(family: str, head: str) -> Row:
    """Try a family in a separate process, which may die or take too long."""
    with WorkerPool(check_families, 1, timeout=SECONDS, method="fork") as pool:
        ((_, row),) = pool.run([[(family, head)]])
    return Row(family, *(row.why,) * 3) if isinstance(row, Lost) else row


def prepare() -> None:
    """Set up the process that forks the ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(50)


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row: yes or no for each way, and the reason of the first no."""
    ways = [one if one in ("yes", "–") else "no" for one in row[1:]]
    if row.one.startswith(NOT_TRIED):
        ways = ["–"] * 3
    reason = next((one for one in row[1:] if one not in ("yes", "–")), "")
    return [row.family, *ways, shorten(reason)]


def shorten(reason: str) -> str:
    """Return the first sentence of a message, without names that differ between families.

    >>> shorten("ValueError: models of MptConfig have no argument position_ids. Run them alone.")
    'models of this config have no argument position_ids'
    """
    text = re.sub(r"\b\w+Config\b", "this config", reason.partition(". ")[0])
    text = re.sub(r": run \w+( model)? (on whole sequences, )?without shard_batch$", "", text)
    text = re.sub(r"^(not tried: )?\w+: | \(\w+(, \w+)*\)", "", text)
    missing = re.search("required positional argument|(have to|must) specify", text)
    return "the model needs inputs besides tokens" if missing else text


WAYS = "**One process: {}. Several ranks: {}. Packed documents: {}.**"


def read_table() -> dict[str, list[str]]:
    """Return the cells of each family of the page: its name, three ways, the reason."""
    cells = {}
    for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("**"):
            ways = re.findall(r": ([^.]+)\.", line)
        if line.startswith("- "):
            families, _, reason = line.partition("`: ")
            cells |= {name: [name, *ways, reason] for name in re.findall(r"`([\w.-]+)", families)}
    return cells


def write_table(rows: dict[str, list[str]], named: tuple[str, ...]) -> None:
    """Write all families into the page, in one list for equal ways and one item for equal reasons.

    named: those that were tried now; none: all. Beside rows of another release of transformers, the page says
    of which one they are.
    """
    head, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, rest = rest.partition(END)
    release, newer = transformers.__version__, set()
    if named:
        release = re.findall(r"^transformers (\S+):", table, re.M)[0]
        newer.update(re.findall(r"`(\S+)`", "".join(re.findall(r"^Of transformers .*", table, re.M))))
        newer.update(named if release != transformers.__version__ else ())
    count = [sum(row[i] == "yes" for row in rows.values()) for i in (1, 2, 3)]
    lines = [
        f"transformers {release}: of {len(rows)} families {count[0]} work on one process, "
        f"{count[1]} on several ranks, {count[2]} with packed documents on several ranks."
    ]
    if newer:
        names = ", ".join(f"`{name}`" for name in sorted(newer))
        lines += ["", f"Of transformers {transformers.__version__}: {names}."]
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for _, (family, *ways, reason) in sorted(rows.items()):
        groups.setdefault(tuple(ways), {}).setdefault(reason, []).append(f"`{family}`")
    order = ["yes", "no", "–"]
    for ways, reasons in sorted(groups.items(), key=lambda group: [order.index(way) for way in group[0]]):
        lines += ["", WAYS.format(*ways), ""]
        for reason, families in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"- {', '.join(families)}" + f": {reason}" * bool(reason))
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest}")


@click.command()
@click.argument("families", nargs=-1)
@click.option("--write", is_flag=True, help="Write the rows into docs/models.md.")
def main(families: tuple[str, ...], write: bool) -> None:
    """Try FAMILIES of transformers, all unless named."""
    prepare()
    heads, rows = list_families(), read_table()
    for family in families or heads:
        row = check_in_child(family, heads[family])
        click.echo("\t".join(row))
        rows[family] = cells_of(row)
    if write:
        write_table({family: rows[family] for family in heads}, families)


if __name__ == "__main__":
    main()
