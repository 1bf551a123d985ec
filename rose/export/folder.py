"""Write a model's folder in Hugging Face's format, completely or not at all.

Shards are written one after the other. Each is read back, and each of its blocks of values is
compared with its hash in the engines. This needs memory for one shard and some blocks. All files
are written to a temporary folder beside the final one, and this folder is renamed last.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rose import config as configuration
from rose import files, models
from rose.agent.chat import ChatFormat
from rose.config import Config, ConfigError, Model, Rollout
from rose.export import adapter
from rose.export.card import Exported, text
from rose.export.weights import StoreWeights, Weights, sources
from rose.trainer.shards import patterns_of
from rose.transfer import versions
from rose.transfer.blocks import Tensor
from rose.transfer.errors import Corrupted, TransferError
from rose.transfer.store import sync

# Files of the base model's folder that are copied, except `LEFT_OUT`.
KEPT = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
LEFT_OUT = ("*.index.json", "recipe.json", "config.json")
TEMPLATES = "additional_chat_templates"  # name of a folder that transformers reads


def export(
    run_dir: Path,
    step: int | None,
    out: Path,
    shard_bytes: int,
    store: Path | None = None,
    base: Path | None = None,
    merge: bool = False,
) -> Exported:
    """Write the weights of `step` (None: the newest) into the new folder `out`.

    `store`: the weight store to read instead of the run's. `base`: the model's folder, if the run's
    own isn't visible. `merge`: write the model with a LoRA run's adapter merged, instead of the
    adapter. Raises `ConfigError` if `run_dir` is no run or `out` is not empty, `TransferError` if
    the step isn't available or all its sources are damaged, and `OSError`.
    """
    # "." has no name, and a folder can't replace a link.
    out = out.resolve()
    check_free(out)
    config = read_config(run_dir)
    lora = config.trainer.lora is not None
    if merge and not lora:
        raise ConfigError("--merge: the run trained all weights, so there is no adapter to merge")
    source = models.check_folder(base) if base else models.resolve(config.model)
    if base:
        _check_shape(source, config)
    step, found = sources(run_dir, step, store)
    with whole_folder(out) as part, stores_linked(found, out, store is None):
        asked = [adapter.Merged(weights, source) for weights in found] if merge else found
        weights, shards, blocks = _write_from_undamaged(asked, part, shard_bytes)
        if lora and not merge:
            adapter.write_config(config, part, source)
            _copy(source, part, ("LICENSE*", "NOTICE*"))
        else:
            copy_rest(source, part, weights.tensors[0].dtype)  # all tensors' dtype
            _write_generation_config(part, config.model, config.rollout)
            _write_template(part, config.model)
        size = sum(t.nbytes for t in weights.tensors)
        alone = lora and not merge
        done = Exported(out, step, weights.where, shards, blocks, size, source, alone)
        (part / "README.md").write_text(text(config, run_dir, done), encoding="utf-8")
    return done


@contextmanager
def stores_linked(found: Sequence[Weights], out: Path, of_the_run: bool) -> Iterator[None]:
    """Read the run's own stores through hard links beside them while the context lasts, because the
    trainer goes on removing versions. Remove links that an earlier export to `out` has left."""
    mine = xxhash.xxh3_64_hexdigest(str(out).encode())
    made = [
        (weights, weights.store.with_name(f".{weights.store.name}.{mine}"))
        for weights in found
        if of_the_run and isinstance(weights, StoreWeights)
    ]
    try:
        for weights, links in made:
            shutil.rmtree(links, ignore_errors=True)
            weights.files = versions.linked(weights.store, links, weights.step)
        yield
    finally:
        for _, links in made:
            shutil.rmtree(links, ignore_errors=True)


def check_free(out: Path) -> None:
    """Raise `ConfigError` unless `out` can become the new folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"--out {out}: exists and is no empty folder; give another name, or remove it first"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: no folder {out.parent}; make it first")


def read_config(run_dir: Path) -> Config:
    """Read a run's configuration. Raises `ConfigError` for a folder that is no run's."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no {path.name} there; give a run's folder, as outputs/NAME")
    tree = configuration.stored(path)
    if {"model_type", "architectures"} & tree.keys():
        raise ConfigError(f"{run_dir}: is a model's folder; give that of a run, as outputs/NAME")
    # The release that ran it has checked it.
    return configuration.from_dict(tree, checked=False)


def _check_shape(source: Path, config: Config) -> None:
    """Raise `ConfigError` if the model in `source` differs in a size from the run's model."""
    found, wanted = configuration.read_shape(source), config.model.shape
    for key in found.__struct_fields__ if wanted is not None else ():
        if getattr(found, key) != getattr(wanted, key):
            raise ConfigError(
                f"{source}: this model's config.json has {key}={getattr(found, key)}, and the "
                f"run's model {getattr(wanted, key)}; give --base the folder of the model that the "
                "run began with"
            )


def _write_from_undamaged(
    found: Sequence[Weights], part: Path, shard_bytes: int
) -> tuple[Weights, int, int]:
    """Write the shards from the first undamaged source. Return (the source, number of shards,
    number of blocks compared)."""
    wrong: list[str] = []
    for weights in found:
        try:
            return weights, *write_shards(weights, part, shard_bytes)
        except adapter.OtherBase:
            raise
        except TransferError as error:
            wrong.append(f"{weights.where}: {error}")
            print(wrong[-1], file=sys.stderr, flush=True)
            for path in part.iterdir():
                path.unlink()
    raise Corrupted("; ".join(wrong))


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder. It is renamed to `out` when the `with` block ends, or removed if
    the block fails. Remains of a killed export are removed too. Raises `ConfigError` while another
    export writes `out`."""
    part, lock = (out.with_name(f".{out.name}.{kind}") for kind in ("part", "lock"))
    with lock.open("w", encoding="utf-8") as file:
        try:
            files.lock_now(file)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another export is writing it") from None
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            yield part
            for path in (*part.rglob("*"), part):
                sync(path)
            os.rename(part, out)
            sync(out.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            lock.unlink(missing_ok=True)


def write_shards(weights: Weights, folder: Path, shard_bytes: int) -> tuple[int, int]:
    """Write the shards, and an index if there are several. Return (number of shards, number of
    blocks compared). Raises `TransferError`."""
    is_adapter = weights.base is not None
    shards = [weights.tensors] if is_adapter else divide(weights.tensors, shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(names) == 1:
        names = [adapter.FILE if is_adapter else adapter.WHOLE]
    compared, prefix = 0, adapter.PREFIX if is_adapter else ""
    for name, tensors in zip(names, shards, strict=True):
        compared += _write_shard(weights, tensors, folder / name, prefix)
    if len(names) > 1:
        shard_of = {t.name: name for name, ts in zip(names, shards, strict=True) for t in ts}
        total = {"total_size": sum(t.nbytes for t in weights.tensors)}
        index = {"metadata": total, "weight_map": shard_of}
        (folder / adapter.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards), compared


def divide(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Divide tensors, in order, into shards of at most `shard_bytes`. A larger tensor gets a shard
    of its own."""
    shards: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _write_shard(weights: Weights, tensors: Sequence[Tensor], path: Path, prefix: str) -> int:
    """Write a shard, read it back, and return the number of blocks compared."""
    values, digests = weights.read(tensors)
    try:
        named = {prefix + name: value for name, value in values.items()}
        save_file(named, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{path}: {error}") from None
    path.chmod(0o666 & ~_umask())  # instead of safetensors' mode for this user alone
    del values, named
    with safe_open(path, "pt") as written:
        for tensor in tensors:
            patterns = patterns_of(written.get_tensor(prefix + tensor.name).reshape(-1))
            bad = versions.differing(patterns, tensor, digests[tensor.name])
            if bad is not None:
                raise Corrupted(
                    f"{weights.culprit(bad)}: {tensor.name}, values {bad.start} to {bad.stop}, are "
                    "not those that the engines had: their xxh3-128 differs; the file is damaged"
                )
    return sum(map(len, digests.values()))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def copy_rest(source: Path, folder: Path, dtype: str) -> None:
    """Copy configuration, tokenizer, chat template and licence of the base model. `dtype`: the
    exported weights' dtype, which config.json names."""
    _copy(source, folder, KEPT)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    named = [key for key in ("dtype", "torch_dtype") if key in config]
    config |= dict.fromkeys(named or ["dtype"], dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not (folder / "generation_config.json").exists():
        from transformers import AutoConfig, GenerationConfig

        made = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
        made.save_pretrained(folder)


def _write_template(folder: Path, model: Model) -> None:
    """Write a chat template that describes tools, if the model's own template ignores them. Servers
    then render prompts as training did."""
    try:
        chat = ChatFormat.of(folder, model)
    # A damaged tokenizer may raise any error. The weights are usable without it.
    except Exception:
        return
    if not chat.native_tools:
        (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
        # A server would use this file for requests with tools, though it ignores tools.
        (folder / "additional_chat_templates" / "tool_use.jinja").unlink(missing_ok=True)


def _write_generation_config(folder: Path, model: Model, rollout: Rollout) -> None:
    """Write model.end_of_turn and training's sampling parameters into generation_config.json, from
    which vLLM takes its defaults. With the base model's temperature, vLLM would serve another
    policy than the trained one. Without model.end_of_turn, it would end turns at other tokens."""
    path = folder / "generation_config.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    penalties = ("repetition_penalty", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
    whole = {key: value for key, value in whole.items() if key not in penalties}
    if model.end_of_turn:
        whole["eos_token_id"] = models.end_tokens(folder, model.end_of_turn)
    sampled = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    whole |= {"do_sample": True} | sampled
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _copy(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the files whose name matches a pattern in `names`, except `LEFT_OUT`."""
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch.fnmatch(path.name, name) for name in names)
        if wanted and path.is_file() and not any(fnmatch.fnmatch(path.name, n) for n in LEFT_OUT):
            shutil.copyfile(path, folder / path.name)
