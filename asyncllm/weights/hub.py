"""Models on the Hugging Face Hub: the files that are needed, through huggingface_hub and its cache.

What is cached serves without a network. huggingface_hub's own settings (HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE,
HF_HUB_DISABLE_PROGRESS_BARS) hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from asyncllm.errors import ModelLoadError, ModelNotFoundError
from asyncllm.weights.gguf import part_names
from asyncllm.weights.safetensors import INDEX, SINGLE, shard_index

_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "*.model",  # tokenizer.model, spiece.model, tiktoken.model
    "vocab.*",
    "merges.txt",
    INDEX,
)


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository at one revision (a branch, a tag or a commit; None is the main branch)."""

    name: str
    revision: str | None = None

    def download_description(self) -> Path:
        """Config, tokenizer and index, without weights. Returns the snapshot's folder."""
        return self._download(_DESCRIPTION)

    def download_safetensors(self, snapshot: Path) -> None:
        """The weights into the same snapshot: the shards of its index, or the single file."""
        names: Sequence[str] = (SINGLE,)
        if (snapshot / INDEX).is_file():
            names = sorted(set(shard_index(snapshot).values()))
        # The snapshot is named after its commit: the weights are of that commit, whatever became of the branch.
        HubRepository(self.name, snapshot.name)._download(names)

    def download_gguf(self, file: str) -> Path:
        """One GGUF file with all its parts. Raises `ModelNotFoundError` if the repository has no such file."""
        path = self._download(part_names(file)) / file
        if not path.is_file():
            files = ", ".join(self.gguf_files()) or "no GGUF at all"
            raise ModelNotFoundError(f"{self.name} on the Hub has no {file}; it has {files}")
        return path

    def gguf_files(self) -> list[str]:
        """The names of all GGUF files of the repository."""
        with _named_errors(self):
            files = HfApi().list_repo_files(self.name, revision=self.revision)
        return sorted(file for file in files if file.endswith(".gguf"))

    def _download(self, patterns: Sequence[str]) -> Path:
        with _named_errors(self):
            return Path(snapshot_download(self.name, revision=self.revision, allow_patterns=list(patterns)))


@contextmanager
def _named_errors(repository: HubRepository) -> Iterator[None]:
    name, revision = repository.name, repository.revision
    try:
        yield
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its licence on the Hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no folder or file {name!r} here and no repository {name} on the Hub (or it is private: "
            "log in with `hf auth login` or set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name} on the Hub has no revision {revision!r}") from error
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"there is no folder or file {name!r}, and that is no name of the Hub: {error}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no folder or file {name!r} here, the Hub cannot be reached, and {name} is not, or not wholly, "
            f"in its cache ({_first_line(error)}); check the network and try again"
        ) from error
    except Exception as error:  # of the client, the transport and the disk, in many classes: all end the same way
        raise ModelLoadError(
            f"{name} could not be downloaded from the Hub ({type(error).__name__}: {_first_line(error)}); "
            "what has arrived is kept: try again"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
