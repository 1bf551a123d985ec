"""Models of a Hugging Face hub. The launcher resolves a model once, to a folder that every rank
loads.

The commit behind a hub id can change, so two ranks that resolve the id could get two revisions.
Besides, compute nodes often have no network. So the launcher downloads one commit (or takes it from
the cache) and writes its folder into the run's configuration. The ranks run with
`HF_HUB_OFFLINE=1`.

Not handled: data sets, and weights that are not safetensors.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from rose import weight_files
from rose.config.errors import ConfigError

# Files that the trainer and the engines read, and files that rose/export copies to an exported
# model. Copies of the weights as .bin, .gguf, .onnx or consolidated files are not downloaded.
WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", "LICENSE*", "NOTICE*")
UNWANTED = ("original/*", "metal/*", "onnx/*", "consolidated*")
REACH_S = 10.0  # seconds for the hub's first answer
TRIES = 2  # requests to the hub; resolving its name may fail once
# Variables in the environment of each process that the launcher starts.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def snapshot(repository: str, revision: str | None = None, key: str = "model.path") -> Path:
    """Return the absolute folder of one commit of `repository`, whose name is the commit's hash.
    Downloads the commit if it is not in the cache, with the hub's progress bars on stderr.

    `revision` is a branch, tag or commit; None is the default branch. `key` is the configuration
    key that gave the id, for errors. Raises `ConfigError` when neither the hub nor the cache has
    the whole commit.
    """
    from huggingface_hub import constants, errors

    named = f"{key}={repository!r}" + (f", revision {revision!r}" if revision else "")
    cache = constants.HF_HUB_CACHE
    try:
        _check_reachable()
        found = _downloaded(repository, revision)
    except errors.GatedRepoError:
        raise ConfigError(
            f"{named}: the hub gives it only to accounts that accepted its terms; accept them on "
            "its page, then `hf auth login` or HF_TOKEN=... for this launch"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(
            f"{named}: the hub has no such revision; give a branch, a tag or a commit"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"{named}: the hub has no such model, or this account may not see it (HF_TOKEN); a "
            f"folder on disk is {key}=/folder" + _as_folder(key)
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{named}: no hub id, which is owner/name ({error})") from None
    # An error of the hub, the file system, the HTTP library (a proxy may refuse) or Xet.
    except Exception as error:
        if (local := cached(repository, revision)) is not None:
            return _checked(repository, local, named)
        raise ConfigError(
            f"{named}: the hub can't be reached and the cache {cache} does not have it whole "
            f"({_first_line(error)}). On a machine with network: `hf download {repository}"
            f"{f' --revision {revision}' if revision else ''}` with HF_HOME on a file system that "
            f"this machine sees, too; or {key}=/folder{_as_folder(key)} for a copy on disk"
        ) from None
    return _checked(repository, found, named)


def _downloaded(repository: str, revision: str | None, **options: Any) -> Path:
    """Return the cached folder of a revision; download files that are missing."""
    from huggingface_hub import snapshot_download

    options |= {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    found = snapshot_download(repository, revision=revision, **options)
    # Symbolic links are not resolved, because this path ends with the commit's hash.
    return Path(found).absolute()


def _checked(repository: str, folder: Path, named: str) -> Path:
    """Check that the folder is complete, print which commit it has, and return it."""
    check_whole(folder, named)
    print(f"{repository}: commit {folder.name[:12]} in {folder}", file=sys.stderr, flush=True)
    return folder


def _check_reachable() -> None:
    """Raise the HTTP library's error if the hub does not answer."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and (error := _unreachable(constants.ENDPOINT)) is not None:
        raise error


@functools.cache
def _unreachable(endpoint: str) -> Exception | None:
    """Return the HTTP library's error if the hub does not answer; any answer counts. The hub
    library's own calls would each retry for half a minute first."""
    from huggingface_hub.utils import get_session

    failed: Exception | None = None
    for _ in range(TRIES):
        try:
            get_session().head(endpoint, timeout=REACH_S, follow_redirects=False)
            return None
        except Exception as error:  # an error of httpx, or of a user's HTTP backend
            failed = error
    return failed


def configuration(repository: str, revision: str | None) -> Path:
    """Return a folder with the model's config.json, which planning needs. If the cache lacks the
    file, download only it. Raises `ConfigError` as `snapshot` does."""
    from huggingface_hub import hf_hub_download

    try:
        _check_reachable()
        return Path(hf_hub_download(repository, "config.json", revision=revision)).parent
    except Exception:  # `snapshot` fails for the same reason, with a `ConfigError`.
        return snapshot(repository, revision)


def cached(repository: str, revision: str | None) -> Path | None:
    """Return the cached folder of `revision`, without network; None if the cache lacks it."""
    try:
        return _downloaded(repository, revision, local_files_only=True)
    except Exception:  # Whatever is wrong with the cache, the caller tries the hub next.
        return None


def check_whole(folder: Path, named: str) -> None:
    """Raise `ConfigError` if a file that trainer or engines need is absent or incomplete."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{named}: {folder} has no {name}; {_download_again(folder)}")
    weight_files.check_files(folder, named, _download_again(folder))


def check_trainable(folder: Path, named: str) -> None:
    """Raise `ConfigError` for a model that ROSE can't train, judged by its config.json alone."""
    kind = _architecture(_configuration(folder, named))
    if kind not in TRAINABLE:
        raise ConfigError(
            f"{named}: its architecture is {kind}; ROSE trains {', '.join(TRAINABLE)}"
        )
    check_weights(folder, named)


def check_weights(folder: Path, named: str) -> None:
    """Raise `ConfigError` for a model whose weights ROSE can't publish as a policy version:
    a quantised model, no language model, or an unknown mixture of experts. Dense language models of
    any architecture pass."""
    raw = _configuration(folder, named)
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"{named}: its weights are quantised ({method}); give the unquantised model"
        )
    if not raw.get("architectures"):
        raise ConfigError(
            f"{named}: its config.json names no architectures, by which vLLM finds the model's "
            "class; write them with save_pretrained"
        )
    if not _architecture(raw).endswith(DECODERS):
        raise ConfigError(
            f"{named}: its architecture is {_architecture(raw)}, in config.json's architectures; "
            "ROSE trains language models, whose classes end in ForCausalLM"
        )
    if not raw.get("model_type"):
        raise ConfigError(
            f"{named}: its config.json names no model_type, by which transformers finds the "
            "model's class; write it with save_pretrained"
        )
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or DTYPES[0]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(
            f"{named}: its config.json has the dtype {dtype!r}; there are {', '.join(DTYPES)}"
        )
    mixture = _architecture(raw) == MIXTURE or any(raw.get(key) for key in EXPERTS)
    if mixture and _architecture(raw) != MIXTURE:
        raise ConfigError(
            f"{named}: its architecture is {_architecture(raw)}; of mixtures, {MIXTURE}"
        )
    dense = raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1
    if mixture and dense:
        raise ConfigError(
            f"{named}: some layers have no experts (mlp_only_layers={raw.get('mlp_only_layers')}, "
            f"decoder_sparse_step={raw.get('decoder_sparse_step')}); ROSE trains mixtures that "
            "have them in every layer"
        )


def _configuration(folder: Path, named: str) -> dict[str, Any]:
    """Return the contents of config.json. Raises `ConfigError` for a file that was cut short. It is
    in the hub's cache then, because `models.check_folder` refuses such a folder of the user. Uses
    `json`, because msgspec refuses Infinity, which transformers writes."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        error = "" if isinstance(found, dict) else "not an object"
    except ValueError as damage:
        error = str(damage)
    if error:
        raise ConfigError(
            f"{named}: {folder}/config.json is no JSON object ({error}); {_download_again(folder)}"
        )
    return found


def _architecture(raw: dict[str, Any]) -> str:
    return (raw.get("architectures") or ["unknown"])[0]


MIXTURE = "Qwen3MoeForCausalLM"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of config.json
TRAINABLE = weight_files.ALIKE
DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")  # allowed in config.json
DECODERS = ("ForCausalLM", "LMHeadModel")  # ends of the names of language models' classes


def _as_folder(key: str) -> str:
    """Return the further key that makes `key` a folder's path, for an error's advice."""
    return " model.source=folder" if key == "model.path" else ""


def _download_again(folder: Path) -> str:
    """Return an error's advice to download the folder again."""
    return f"remove {folder} and start again with network"


def _first_line(error: Exception) -> str:
    from huggingface_hub import constants

    offline = "HF_HUB_OFFLINE is set; " if constants.HF_HUB_OFFLINE else ""
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{offline}{type(error).__name__}: {text[:200]}"
