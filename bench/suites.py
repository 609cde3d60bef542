"""What is measured: named suites of benchmark cases."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fa4
from fa4.oracle.cases import in_blocks
from fa4.runtime import nvfp4, scaled_rows
from fa4.torch_ops.flops import unmasked_pairs

# `BenchCase.dtype`: also e4m3 with scales of blocks of 32 numbers, and e2m1 with those of 16.
E4M3, MXFP8, NVFP4 = "float8_e4m3fn", "mxfp8", "nvfp4"
IN_BLOCKS = MXFP8, NVFP4  # also recipes of `fa4.quantize`
HIDDEN = 2048  # heads * head_dim, as in the published comparisons of the field


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One shape in one direction ("fwd" or "bwd"). page_size: rows of a page, if keys and values lie in pages. fp8:
    these are a cache of 8-bit numbers. nvfp4: of 4-bit numbers with scales. v_in_k: v is the memory of k's first
    columns, as in a cache of latents (MLA). scaled_rows: of 656 bytes each, with factors inside. window: how far a
    query sees to its left, with causal; None for all keys."""

    direction: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    dtype: str = "bfloat16"
    page_size: int | None = None
    fp8: bool = False
    v_in_k: bool = False
    scaled_rows: bool = False
    nvfp4: bool = False
    window: int | None = None

    @property
    def kind(self) -> str:
        """Which keys a query sees."""
        return f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"

    @property
    def label(self) -> str:
        d = str(self.head_dim) if self.head_dim == self.head_dim_v else f"({self.head_dim},{self.head_dim_v})"
        lengths = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        heads = str(self.heads_q) if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        pages = "" if self.page_size is None else f" pages of {self.page_size}"
        kinds = (" fp8 cache", self.fp8), (" nvfp4 cache", self.nvfp4), (" 656-byte", self.scaled_rows)
        cache = "".join(name for name, is_so in kinds if is_so)
        cache += " latents" if self.v_in_k else ""
        return f"{self.direction} d{d} {self.kind} b{self.batch} h{heads} {lengths} {self.dtype}{cache}{pages}"

    @property
    def is_predicted_only(self) -> bool:
        """Whether no provider is timed on the case."""
        return self.dtype == E4M3 or (self.dtype == MXFP8 and self.direction == "bwd")

    @property
    def converts_kv(self) -> bool:
        return self.fp8 or self.nvfp4 or self.scaled_rows

    @property
    def flops(self) -> int:
        """Floating-point operations over the visible pairs; backward 2.5 times forward when head_dims are equal."""
        pairs = unmasked_pairs(self.seqlen_q, self.seqlen_k, self.window, 0 if self.causal else None)
        per_pair = (
            self.head_dim + self.head_dim_v if self.direction == "fwd" else 3 * self.head_dim + 2 * self.head_dim_v
        )
        return 2 * self.batch * self.heads_q * pairs * per_pair

    @property
    def nbytes(self) -> int:
        """Of a forward's q, k, v and out, each once."""
        columns = self.head_dim + self.head_dim_v
        of_keys = self.head_dim if self.v_in_k else columns
        size = {"bfloat16": 2, E4M3: 1, MXFP8: 33 / 32, NVFP4: nvfp4.BYTES_OF_NUMBER}.get(self.dtype, 4)
        of_number = 1 if self.fp8 else nvfp4.BYTES_OF_NUMBER if self.nvfp4 else size
        of_key = scaled_rows.BYTES_OF_ROW if self.scaled_rows else int(of_keys * of_number)
        of_queries = (size * self.head_dim + max(size, 2) * self.head_dim_v) * self.seqlen_q * self.heads_q
        return self.batch * (of_queries + of_key * self.seqlen_k * self.heads_kv)

    @property
    def reads_memory(self) -> bool:
        """Whether memory, not products, is what takes a forward's time on any chip so far."""
        return self.direction == "fwd" and self.flops < 64 * self.nbytes


def made_tensors(case: BenchCase, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v with gradients wanted in the backward, and dout. k and v hold the numbers that a cache of them holds, and
    all three those of 8- or 4-bit tensors with scales of blocks."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.bfloat16 if case.dtype in IN_BLOCKS else getattr(torch, case.dtype)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        return torch.randn(case.batch, seqlen, heads, dim, device=device, generator=generator).to(dtype)

    q = normal(case.seqlen_q, case.heads_q, case.head_dim)
    k = normal(case.seqlen_k, case.heads_kv, case.head_dim)
    if case.scaled_rows:
        k = scaled_rows.values(scaled_rows.quantised(k))
    v = k[..., : case.head_dim_v] if case.v_in_k else normal(case.seqlen_k, case.heads_kv, case.head_dim_v)
    if case.fp8:
        k, v = (x.to(torch.float8_e4m3fn).to(dtype) for x in (k, v))
    if case.nvfp4:
        k, v = (nvfp4.values(*nvfp4.quantised(x), dtype) for x in (k, v))
    if case.dtype in IN_BLOCKS:
        lengths = None, None, v.shape[1] if case.dtype == NVFP4 else None
        q, k, v = (fa4.dequantize(*x, dtype, seqlen=n) for x, n in zip(in_blocks(case.dtype, q, k, v), lengths))
    dout = normal(case.seqlen_q, case.heads_q, case.head_dim_v)
    if case.direction == "bwd":
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return q, k, v, dout


def square(direction: str, seqlen: int, head_dim: int, causal: bool, *, tokens: int = 16384, **rest) -> BenchCase:
    """Self-attention with `tokens` tokens in all and HIDDEN / head_dim heads."""
    heads = rest.pop("heads", HIDDEN // head_dim)
    return BenchCase(
        direction=direction,
        batch=max(1, tokens // seqlen),
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads_q=heads,
        heads_kv=rest.pop("heads_kv", heads),
        head_dim=head_dim,
        head_dim_v=rest.pop("head_dim_v", head_dim),
        causal=causal,
        **rest,
    )


def _decode(seqlen_k: int, batch: int, heads_q: int = 32, head_dim: int = 128, **rest) -> BenchCase:
    return BenchCase("fwd", batch, 1, seqlen_k, heads_q, 8, head_dim, head_dim, True, **rest)


def _latents(
    seqlen_k: int, batch: int, heads: int, rows: int = 1, page_size: int | None = 64, **rest: bool
) -> BenchCase:
    """Absorbed latent attention, with DeepSeek's widths: decoding, or all rows of a prompt."""
    return BenchCase("fwd", batch, rows, seqlen_k, heads, 1, 576, 512, True, page_size=page_size, v_in_k=True, **rest)


def _narrow(*kinds: str) -> tuple[BenchCase, ...]:
    """Decoding from caches of 8 or 4 bits, and of 16. kinds: fields of `BenchCase`."""
    cases = (
        *(
            _decode(seqlen_k, batch, page_size=page_size)
            for page_size in (None, 16, 128)
            for batch, seqlen_k in ((1, 32768), (1, 131072), (16, 8192), (128, 1024))
        ),
        _decode(8192, 16, 64),
        _decode(8192, 16, head_dim=64),
        BenchCase("fwd", 1, 512, 32768, 32, 8, 128, 128, True),
    )
    return tuple(
        one for case in cases for one in (*(replace(case, **dict.fromkeys([kind], True)) for kind in kinds), case)
    )


_LARGEST_CACHE = 20 << 30  # bytes


def _decodes() -> tuple[BenchCase, ...]:
    cases = (
        _decode(seqlen_k, batch, heads_q, head_dim)
        for head_dim in (128, 64)
        for heads_q in (32, 64)
        for batch in (1, 16, 128)
        for seqlen_k in (1024, 8192, 32768, 131072)
    )
    return tuple(case for case in cases if case.nbytes <= _LARGEST_CACHE)


def _squares(seqlens, head_dims, **rest) -> tuple[BenchCase, ...]:
    return tuple(
        square(direction, seqlen, head_dim, causal, **rest)
        for direction in ("fwd", "bwd")
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    )


def _hopper() -> tuple[BenchCase, ...]:
    """The paper's shapes, shorter and longer, more head dims, and grouped heads."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    grouped = dict(heads=32, heads_kv=8)
    return (
        *_squares(lengths, (64, 128)),
        *_squares((1024, 4096, 16384), (96,), heads=21),
        *_squares((1024, 4096, 16384), (192,), heads=8, head_dim_v=128),
        *_squares((1024, 4096, 16384), (256,)),
        *_squares((2048, 4096, 8192), (128,), tokens=8192, **grouped),
        *_squares((16384,), (128,), **grouped),
    )


def _prompt(seqlen: int, heads: tuple[int, int], head_dim: int, window: int | None = None) -> BenchCase:
    """All rows of a prompt. heads: of queries, and of keys and values."""
    return BenchCase("fwd", 1, seqlen, seqlen, *heads, head_dim, head_dim, True, window=window)


def _image(queries: int, keys: int | None = None) -> BenchCase:
    """An attention of a diffusion transformer. keys: of a text, else of the image."""
    return BenchCase("fwd", 1, queries, keys or queries, 24, 24, 128, 128, False)


def _pairs(
    heads: int, head_dim: int, lengths: tuple[tuple[int, int, int], ...], directions: tuple[str, ...] = ("fwd", "bwd")
) -> tuple[BenchCase, ...]:
    """Attention of all queries to all keys. lengths: batch, queries, keys."""
    return tuple(
        BenchCase(direction, batch, queries, keys, heads, heads, head_dim, head_dim, False)
        for batch, queries, keys in lengths
        for direction in directions
    )


def _drawn(seed: int) -> tuple[BenchCase, ...]:
    """Ten shapes that nobody chose, of 0.1 to 6 TFLOP, for predictions that precede the measurement."""
    draw, found = random.Random(seed), []
    while len(found) < 10:
        head_dim, direction, causal = (
            draw.choice((64, 72, 80, 96, 128)),
            draw.choice(("fwd", "bwd")),
            draw.random() < 0.4,
        )
        seqlen, heads = draw.randrange(300, 9000), draw.choice((8, 12, 16, 24, 32))
        batch = max(1, round(draw.choice((1, 2, 4)) * 16384 / seqlen * 1024 / (heads * head_dim)))
        keys = seqlen if causal or draw.random() < 0.7 else draw.randrange(100, 9000)
        case = BenchCase(direction, batch, seqlen, keys, heads, heads, head_dim, head_dim, causal)
        if 1e11 < case.flops < 6e12:
            found.append(case)
    return tuple(found)


def _vision() -> tuple[BenchCase, ...]:
    """Encoders of images, with heads, columns and tokens as in SigLIP so400m (72 columns), ViT-L, Qwen2-VL (80) and
    InternViT-6B; an odd number of tokens; and attention of a few learned queries to an image's tokens."""
    return (
        *_pairs(16, 72, ((32, 729, 729), (8, 4096, 4096), (4, 4173, 4173))),
        *_pairs(16, 64, ((64, 257, 257), (16, 577, 577))),
        *_pairs(16, 80, ((4, 4173, 4173),)),
        *_pairs(25, 128, ((8, 1025, 1025),)),
        *_pairs(16, 72, ((32, 64, 4173),), ("fwd",)),
        *_pairs(12, 64, ((64, 32, 257),), ("fwd",)),
    )


def _diffusion() -> tuple[BenchCase, ...]:
    """Denoisers of images and videos, with heads, columns and tokens as in FLUX, SDXL, PixArt (72 columns) and Wan 2.1:
    attention among the tokens of an image, and to the few of a text."""
    return (
        *_pairs(24, 128, ((1, 4608, 4608),)),
        *_pairs(10, 64, ((8, 4096, 4096), (8, 4096, 77))),
        *_pairs(20, 64, ((8, 1024, 77),)),
        *_pairs(16, 72, ((8, 4096, 4096), (8, 4096, 300), (8, 4173, 120))),
        *_pairs(12, 128, ((1, 32760, 32760), (1, 32760, 512)), ("fwd",)),
        *_pairs(40, 128, ((1, 32760, 32760), (1, 32760, 512)), ("fwd",)),
    )


def _few_keys() -> tuple[BenchCase, ...]:
    """Backwards with few key blocks for a chip: attention to a text, as in Wan 2.1, SDXL and PixArt; short sequences of
    two key heads, as in Qwen2 0.5B; and more queries than keys."""
    return (
        *_pairs(40, 128, ((1, 32760, 512),), ("bwd",)),
        *_pairs(12, 128, ((1, 32760, 512),), ("bwd",)),
        *_pairs(10, 64, ((8, 4096, 77),), ("bwd",)),
        *_pairs(16, 72, ((8, 4173, 120), (8, 4096, 300)), ("bwd",)),
        *_pairs(16, 128, ((1, 16384, 1024), (1, 16384, 2048)), ("bwd",)),
        *_pairs(16, 64, ((1, 16384, 1024),), ("bwd",)),
        *(BenchCase("bwd", 4, seqlen, seqlen, 14, 2, d, d, True) for d in (64, 128) for seqlen in (1000, 2000)),
    )


def _consumer() -> tuple[BenchCase, ...]:
    """Shapes of graphics cards and small workstations; the tensors of each fit 8 GB."""
    training = [
        square(direction, seqlen, d, True, tokens=8192, heads=heads)
        for d, heads in ((64, 12), (128, 16))
        for direction in ("fwd", "bwd")
        for seqlen in (1024, 2048, 4096)
    ]
    prompts = [_prompt(seqlen, (32, 8), 128) for seqlen in (1024, 2048, 4096, 8192, 16384)]
    images = [_image(4096), _image(8192), _image(16384), _image(4096, 512), _image(16384, 512)]
    multiplied = prompts[2], prompts[4], training[2], images[0], images[2], images[4]
    return (
        *prompts,
        *(_prompt(seqlen, (32, 8), 64) for seqlen in (1024, 4096, 16384)),
        *(_prompt(seqlen, (64, 8), 64, window=127) for seqlen in (1024, 4096, 16384)),  # as in gpt-oss
        *training,
        *images,
        *(replace(case, dtype=dtype) for dtype in IN_BLOCKS for case in multiplied),
    )


_CPU = tuple(
    BenchCase(direction, 1, seqlen, seqlen, heads, heads, 64, 64, causal, "float32")
    for direction in ("fwd", "bwd")
    for heads, seqlen in ((8, 2048), (1, 16384))
    for causal in (False, True)
)

SUITES: dict[str, tuple[BenchCase, ...]] = {
    "smoke": _squares((512, 1000), (64, 128), tokens=4096),
    "paper": _squares((1024, 4096, 16384), (64, 128)),
    "short": _squares((128, 256, 512), (64, 128)),
    "decode": _decodes(),
    "paged": tuple(
        _decode(seqlen_k, batch, page_size=page_size)
        for page_size in (1, 16, 64, 128, 256)
        for batch, seqlen_k in ((1, 32768), (16, 8192), (128, 1024))
    ),
    "fp8-cache": _narrow("fp8"),
    "nvfp4-cache": _narrow("nvfp4", "fp8"),
    "prefill-chunk": tuple(
        BenchCase("fwd", 1, rows, seqlen_k, 32, 8, 128, 128, True, page_size=page_size)
        for page_size in (None, 16, 128)
        for rows in (512, 2048)
        for seqlen_k in (8192, 32768)
    ),
    "sm100": (
        *_squares((512, 1024, 2048, 4096, 8192, 16384, 32768), (64, 128), tokens=32768),
        *(
            square(direction, seqlen, 192, causal, tokens=32768, heads=16, head_dim_v=128)
            for direction in ("fwd", "bwd")
            for causal in (False, True)
            for seqlen in (4096, 16384)
        ),
    ),
    "hopper": _hopper(),
    "consumer": _consumer(),
    "wide": (
        *_squares((1024, 4096, 16384), (256, 512)),
        *_squares((4096,), (192, 320), heads=8),
        *_squares((4096,), (512,), heads=16, heads_kv=4),
        *_squares((4096,), (576,), heads=32, heads_kv=1, head_dim_v=512),
    ),
    "mla": (
        *(
            _latents(seqlen_k, batch, heads)
            for heads in (16, 64, 128)
            for seqlen_k, batch in ((131072, 1), (32768, 8), (32768, 32), (8192, 128))
        ),
        *(_latents(8192, 64, 128, rows) for rows in (1, 2, 4)),
        *(
            _latents(*sizes, **{cache: True})
            for cache in ("fp8", "scaled_rows")
            for sizes in (
                (32768, 8, 16),
                (32768, 32, 16),
                (8192, 128, 64),
                (8192, 64, 128),
                (8192, 64, 128, 4),
            )
        ),
    ),
    "latents": (
        *(_latents(seqlen_k, batch, 128, 1, None) for seqlen_k, batch in ((32768, 32), (8192, 128), (8192, 74))),
        _latents(8192, 64, 128, 2, None),
        *(
            _latents(seqlen_k, batch, heads, 1, None)
            for heads in (16, 64)
            for seqlen_k, batch in ((32768, 32), (8192, 128))
        ),
        _latents(131072, 1, 128, 1, None),
        *(_latents(seqlen, 1, 128, seqlen, None) for seqlen in (4096, 16384)),
    ),
    # Heads, head_dim and windows as in gpt-oss, of models like Mistral and Gemma; and one head for each key head.
    "windows": tuple(
        BenchCase(direction, max(1, 16384 // seqlen), seqlen, seqlen, *heads, d, d, True, window=keys - 1)
        for direction in ("fwd", "bwd")
        for heads, d, keys in (
            ((64, 8), 64, 128),
            ((64, 8), 64, 1024),
            ((32, 8), 128, 512),
            ((32, 8), 128, 4096),
            ((16, 8), 256, 512),
            ((16, 16), 128, 512),
        )
        for seqlen in (2048, 8192, *((4096, 32768) if keys == 128 else ()))
        if keys < seqlen
    ),
    "few-keys": _few_keys(),
    # Predicted only; `python -m bench.fp8` times forwards.
    "e4m3": tuple(
        replace(case, dtype=dtype)
        for case in (
            *_squares((1024, 4096, 16384), (128,), tokens=32768),
            *_squares((4096, 16384), (64,), tokens=32768),
            *(
                square("fwd", 16384, *dims, causal, tokens=32768, **rest)
                for dims, rest in (((192,), dict(heads=16, head_dim_v=128)), ((256,), {}))
                for causal in (False, True)
            ),
        )
        for dtype in ("bfloat16", E4M3, MXFP8)
        if dtype != MXFP8 or case.head_dim_v <= (128 if case.direction == "fwd" else 64)
    ),
    "vision": _vision(),
    "drawn": _drawn(20261128),
    "diffusion": _diffusion(),
    "cpu": _CPU,
    "tiny": tuple(  # seconds on any CPU: shows that checks, rows and plots work
        BenchCase(direction, 1, seqlen, seqlen, 2, 2, 64, 64, True, "float32")
        for direction in ("fwd", "bwd")
        for seqlen in (64, 128)
    ),
}
