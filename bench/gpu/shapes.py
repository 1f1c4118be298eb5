"""The models whose shapes are checked."""

from dataclasses import dataclass

ELEMENT = 2  # bytes of bf16


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; from the config.json of its checkpoint."""

    name: str
    hidden: int
    heads: int
    heads_k: int
    head_dim: int
    inner: int
    vocab: int

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the projections."""
        attended = self.heads * self.head_dim
        return {
            "qkv": (attended + 2 * self.heads_k * self.head_dim, self.hidden),
            "o": (self.hidden, attended),
            "down": (self.hidden, self.inner),
        }


MODELS = (  # the most important first: time may run out
    ModelShape("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
    ModelShape("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256),
    ModelShape("Qwen3-4B", 2560, 32, 8, 128, 9728, 151936),
)
TOYS = (ModelShape("toy", 64, 4, 2, 64, 72, 200),)


@dataclass(frozen=True)
class Sizes:
    """How much is checked and measured.

    Attributes:
        models: whose shapes.
        rows: tokens of a pass, for the measurements.
        products: of the probe of mma.
        keys: cached, for attention.
        batches: numbers of sequences, for attention.
        uniforms: whose noise is compared with the CPU's: there are 2**24.
        rotated_bytes: of weights that a pass of a measurement reads, so that none is in a cache.
        copied_bytes: of the measurement of copying.
    """

    models: tuple[ModelShape, ...]
    rows: tuple[int, ...]
    products: int
    keys: int
    batches: tuple[int, ...]
    uniforms: int
    rotated_bytes: int
    copied_bytes: int


FULL = Sizes(
    MODELS,
    rows=(1, 5, 8, 16),
    products=4096,
    keys=8192,
    batches=(1, 8),
    uniforms=1 << 24,
    rotated_bytes=400 << 20,
    copied_bytes=2 << 30,
)
TOY = Sizes(
    TOYS,
    rows=(1, 5),
    products=4,
    keys=70,
    batches=(1, 3),
    uniforms=1 << 12,
    rotated_bytes=40 << 10,
    copied_bytes=1 << 20,
)
