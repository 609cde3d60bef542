"""python -m bench.mods --backend sm100: what functions of callers cost in instructions, emulated.

Each problem is a forward of one head of bf16, head_dim 128, in a backend's kernels, the portable ones on a Hopper: a
function that is built in, the same as a function of a caller, and where flash-attn-4 is installed (Blackwell) its
kernels with its own functions. Counted are the executed machine instructions of all warps; predicted are the cycles of
the launch, on as many multiprocessors as it has CTAs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch
from torch import Tensor

import fa4

HEAD_DIM, DOCUMENT = 128, 200
_CHIPS = {"sm80": "sm_90a", "sm90": "sm_90a", "sm100": "sm_100a"}
Attend = Callable[[Tensor, Tensor, Tensor], object]


def alibi(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * torch.exp2(-8.0 * (h + 1) / 16)


def _documents(tokens: int) -> Tensor:
    return torch.arange(tokens, device="cuda", dtype=torch.int32) // DOCUMENT


def ours(backend: str, tokens: int) -> dict[str, Attend]:
    """By name; a built-in one comes before its twin."""
    of_documents = fa4.masks.both(fa4.masks.causal, fa4.masks.documents(_documents(tokens)))

    def calling(**call) -> Attend:
        return lambda q, k, v: fa4.flash_attn_func(q, k, v, backend=backend, **call)

    def by_blocks(mask_mod: Callable) -> Attend:
        return calling(block_mask=fa4.create_block_mask(mask_mod, None, None, tokens, tokens, device="cuda"))

    return {
        "full": calling(),
        "causal": calling(causal=True),
        "causal, block mask": by_blocks(fa4.masks.causal),
        "softcap": calling(softcap=20.0),
        "softcap, score_mod": calling(score_mod=fa4.scores.softcap(20.0)),
        "ALiBi, score_mod": calling(score_mod=alibi),
        "documents, block mask": by_blocks(of_documents),
    }


def flash_attn_4(tokens: int) -> dict[str, Attend]:
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    @cute.jit
    def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * (-8.0 / 16))
        return score + (kv_idx - q_idx).to(cutlass.Float32) * slope

    @cute.jit
    def causal(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return kv_idx <= q_idx

    @cute.jit
    def documents(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        document = aux_tensors[0]
        own, other = (utils.scalar_to_ssa(document[i[0]], cutlass.Int32) for i in (q_idx, kv_idx))
        return (kv_idx <= q_idx) & (own == other)

    def calling(**call) -> Attend:
        return lambda q, k, v: flash_attn_func(q, k, v, **call)

    def by_blocks(mask_mod: Callable, theirs: Callable, **call) -> Attend:
        size = (256, 128)  # what two of its tiles are
        made = fa4.create_block_mask(mask_mod, 1, 1, tokens, tokens, device="cuda", BLOCK_SIZE=size)
        lists = made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices
        return calling(mask_mod=theirs, block_sparse_tensors=BlockSparseTensorsTorch(*lists, block_size=size), **call)

    document = _documents(tokens)
    of_documents = fa4.masks.both(fa4.masks.causal, fa4.masks.documents(document))
    return {
        "full": calling(),
        "causal": calling(causal=True),
        "causal, block mask": by_blocks(fa4.masks.causal, causal),
        "softcap, score_mod": calling(softcap=20.0),  # which it makes a score_mod of
        "ALiBi, score_mod": calling(score_mod=alibi),
        "documents, block mask": by_blocks(of_documents, documents, aux_tensors=[document]),
    }


def rows(backend: str, tokens: int, providers: tuple[str, ...], only: tuple[str, ...]) -> Iterator[dict]:
    from fa4.emulator import emulate  # which not every machine has

    for provider in providers:
        with emulate(_CHIPS[backend]):
            names = list(ours(backend, tokens) if provider == "fa4" else flash_attn_4(tokens))
        for name in names:
            if only and name not in only:
                continue
            with emulate(_CHIPS[backend], timing=True) as gpu, torch.no_grad():
                attend = (ours(backend, tokens) if provider == "fa4" else flash_attn_4(tokens))[name]
                q, k, v = (torch.randn(1, tokens, 1, HEAD_DIM).to("cuda", torch.bfloat16) for _ in range(3))
                attend(q, k, v)
            launches = gpu.timing().launches
            yield {
                "backend": backend, "tokens": tokens, "provider": provider, "function": name,
                "instructions": sum(times.issued for times in launches),
                "cycles": round(sum(times.cycles for times in launches)), "launches": len(launches),
            }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Rows of --out as markdown: thousands of instructions, of a twin of what is built in also by how much more."""
    found = {(row["backend"], row["provider"], row["function"]): row["instructions"] for row in rows}
    columns = [(backend, "fa4") for backend in _CHIPS] + [("sm100", "flash-attn-4")]
    lines = [
        "| function | " + " | ".join(backend if who == "fa4" else who for backend, who in columns) + " |",
        "|---" + "|--:" * 4 + "|",
    ]
    for name in dict.fromkeys(name for _, _, name in found):
        cells = []
        for column in columns:
            count, built_in = found.get((*column, name)), found.get((*column, name.partition(",")[0]))
            more = f" ({count / built_in - 1:+.0%})" if count and built_in and "," in name else ""
            cells.append(f"{count / 1000:.1f}{more}" if count else "")
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--backend", type=click.Choice(list(_CHIPS)), default="sm100", show_default=True)
@click.option("--tokens", default=512, show_default=True)
@click.option("--only", multiple=True, help="Of the functions.")
@click.option("--provider", multiple=True, help="fa4 and, on Blackwell, flash-attn-4, if it is installed.")
@click.option("--out", type=click.Path(dir_okay=False), help="Add rows to a file, lines of JSON.")
def main(backend: str, tokens: int, only: tuple[str, ...], provider: tuple[str, ...], out: str | None) -> None:
    has_peer = backend == "sm100" and importlib.util.find_spec("flash_attn") is not None
    for row in rows(backend, tokens, provider or ("fa4", *["flash-attn-4"] * has_peer), only):
        print(*row.values(), flush=True)
        if out is not None:
            with Path(out).open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
