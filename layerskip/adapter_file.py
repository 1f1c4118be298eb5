"""The two files of an exit adapter: ``exit_adapter.json`` and ``exit_adapter.safetensors``."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from layerskip.adapter_shape import AdapterShape, check_temperature
from layerskip.files import read_json, reason_of, write_bytes, write_json

ADAPTER_VERSION = 1
JSON_FILE, TENSOR_FILE = "exit_adapter.json", "exit_adapter.safetensors"


@dataclass(frozen=True)
class AdapterFile:
    """What a saved adapter is, without its tensors.

    Attributes:
        folder: that it is in.
        backbone: fingerprint of the checkpoint that it was trained on.
        temperature: of its logits.
        measurements: made with it.
    """

    folder: Path
    shape: AdapterShape
    backbone: str
    temperature: float
    measurements: Mapping[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """By parameter name, on the CPU.

        Raises:
            ValueError: they cannot be read.
        """
        path = self.folder / TENSOR_FILE
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"exit adapter {path} cannot be read: {error}") from None

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write both files, each whole or not at all; the folder is made if it is not there.

        Raises:
            ValueError: they cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be made: {error.strerror}") from None
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        write_bytes(self.folder / TENSOR_FILE, save(plain))
        content = {
            "version": ADAPTER_VERSION,
            "shape": self.shape.to_dict(),
            "backbone": self.backbone,
            "temperature": self.temperature,
            "measurements": dict(self.measurements),
        }
        write_json(self.folder / JSON_FILE, content, indent=2)


def read_adapter(folder: str | Path) -> AdapterFile:
    """What a folder's ``exit_adapter.json`` says.

    Raises:
        ValueError: there is none, it is of another version, or it is not whole.
    """
    folder = Path(folder)
    path = folder / JSON_FILE
    if not path.is_file():
        raise ValueError(
            f"exit adapter {folder} has no {JSON_FILE}; give the folder that the recipe wrote"
        )
    content = read_json(path, "file of an exit adapter")
    version = content.get("version") if isinstance(content, dict) else None
    if version != ADAPTER_VERSION or isinstance(version, bool):
        raise ValueError(
            f"{path} has exit adapter version {version}; this layerskip reads version "
            f"{ADAPTER_VERSION}"
        )
    try:
        temperature = content["temperature"]
        check_temperature(temperature)
        return AdapterFile(
            folder,
            AdapterShape.from_dict(content["shape"]),
            str(content["backbone"]),
            float(temperature),
            dict(content["measurements"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an exit adapter ({reason_of(error)})") from None
