"""The masks and scores that attention-gym publishes for torch's flex_attention, called as they come; small.

Source: https://github.com/meta-pytorch/attention-gym, the package attn-gym.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attn_gym import masks, mods
from torch import Tensor

import fa4

from .oracle import Problem

LENGTH, HEADS, SIDE = 144, 2, 12  # a canvas is SIDE x SIDE
# Of what `make` gives, which imports torch's Inductor: the tests' parameters are known without.
NAMES = (
    "causal",
    "sliding_window",
    "global_sliding_window",
    "prefix_lm",
    "document",
    "packed_causal_document",
    "shared_prefix",
    "dilated_sliding_window",
    "block_diffusion",
    "batchify",
    "natten",
    "tiled_natten",
    "morton_natten",
    "sta_2d",
    "sta_3d",
    "svg_spatial",
    "svg_temporal",
    "vision_cross_attention",
    "jetspec_training",
    "vsa",
    "jetspec_tree",
    "alibi",
    "tanh_softcap",
    "tanh_softcap_approx",
    "sandwich",
    "activation_gelu",
    "activation_relu",
    "graphormer_spatial",
    "graphormer_edges",
    "mla_rope",
)


@dataclass
class Published:
    """A mask_mod, or a score_mod with what it is trained on, for LENGTH queries and keys unless it says else."""

    mask_mod: object = None
    score_mod: object = None
    trained: tuple[Tensor, ...] = ()
    sizes: tuple[int, int] = (LENGTH, LENGTH)
    heads: int | None = None  # if each has a mask of its own

    def by_blocks(self, create, device: str, size: int = 128):
        """Its block mask; a score's is causal."""
        mask_mod = self.mask_mod or fa4.masks.causal
        return create(mask_mod, None, self.heads, *self.sizes, device=device, BLOCK_SIZE=size)


def make(device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Published]:
    """By name. dtype: of tensors that are trained."""
    generator = torch.Generator().manual_seed(11)

    def ints(*values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def leaf(*shape: int) -> Tensor:
        return normal(*shape).requires_grad_()

    of_masks = {
        "causal": masks.causal_mask,
        "sliding_window": masks.generate_sliding_window(30),
        "global_sliding_window": masks.generate_global_sliding_window(
            11, torch.arange(LENGTH, device=device) % 50 == 17
        ),
        "prefix_lm": masks.generate_prefix_lm_mask(50),
        "document": masks.generate_doc_mask_mod(masks.causal_mask, ints(0, 20, 21, 100, LENGTH)),
        "packed_causal_document": masks.generate_packed_causal_doc_mask_mod(ints(0, 20, 21, 100, LENGTH)),
        "shared_prefix": masks.generate_shared_prefix_mask_mod(ints(0, 40, 60, 99, 120, LENGTH), ints(0, 0, 0, 3, 3)),
        "dilated_sliding_window": masks.generate_dilated_sliding_window(36, 3),
        "block_diffusion": masks.generate_block_diffusion_mask(LENGTH // 2, 12),
        "batchify": masks.batchify_mask_mod(masks.generate_sliding_window(20), 48),
        "natten": masks.generate_natten(SIDE, SIDE, 5, 3),
        "tiled_natten": masks.generate_tiled_natten(SIDE, SIDE, 5, 7, 4, 3),
        "morton_natten": masks.generate_morton_natten(SIDE, SIDE, 5, 5),
        "sta_2d": masks.generate_sta_mask_mod_2d((12, 8), (6, 6), (3, 2), 40),
        "sta_3d": masks.generate_sta_mask_mod_3d((4, 4, 6), (2, 4, 6), (2, 2, 2), 30),
        "svg_spatial": masks.generate_spatial_head_mask_mod(14, 5, 26, 2, attn_sink=True, round_width=8),
        "svg_temporal": masks.generate_temporal_head_mask_mod(14, 5, 26, 2),
        "vision_cross_attention": masks.generate_vision_cross_attention_mask_mod(
            ints([0, 70], [20, 90], [90, LENGTH]), LENGTH // 3
        ),
        "jetspec_training": masks.generate_jetspec_training_mask_mod(0, 12),
    }
    made = {name: Published(mask_mod) for name, mask_mod in of_masks.items()}
    # Fewer queries than keys.
    ancestors = masks.build_tree_ancestor_matrix([-1, *((i - 1) // 2 for i in range(1, 44))], device)
    tree = masks.generate_jetspec_tree_causal_mask_mod(100, ancestors)
    # Each tile of queries has a row of the tiles that it sees.
    tiles = torch.randint(0, 9, (1, HEADS, 9, 4), generator=generator).to(device)
    made["vsa"] = Published(masks.generate_vsa_mask_mod(tiles, 16, ints(*[16] * 8, 11)), heads=HEADS)
    made["jetspec_tree"] = Published(tree, sizes=(44, LENGTH))

    near = torch.rand(1, LENGTH, LENGTH, generator=generator) < 0.02
    near = (near | near.mT).to(device)
    distances = mods.shortest_path_distances(near, 4)
    kinds = torch.randint(0, 4, near.shape, generator=generator).to(device)
    spatial, edges = leaf(HEADS, 6), leaf(HEADS, 3, 4)
    rope = normal(1, HEADS, LENGTH, 8), normal(1, 1, LENGTH, 8)
    of_scores = {
        "alibi": (mods.generate_alibi_bias(HEADS),),
        "tanh_softcap": (mods.generate_tanh_softcap(2),),
        "tanh_softcap_approx": (mods.generate_tanh_softcap(2, approx=True),),
        "sandwich": (mods.generate_sandwich_bias(HEADS, LENGTH, device=device),),
        "activation_gelu": (mods.generate_activation_score_mod(),),
        "activation_relu": (mods.generate_activation_score_mod(F.relu),),
        "graphormer_spatial": (mods.generate_graphormer_spatial_bias(spatial, distances), spatial),
        # Each place on a path has a table of its own, which is a part of the one that is trained.
        "graphormer_edges": (
            mods.generate_graphormer_edge_bias(edges, *mods.shortest_path_edge_types(near, kinds, 3)),
            edges,
        ),
        "mla_rope": (mods.generate_mla_rope_score_mod(*rope, HEADS),),
    }
    return made | {name: Published(None, *score[:1], score[1:]) for name, score in of_scores.items()}


@functools.cache
def problems(device: str = "cpu") -> dict[str, Problem]:
    """For kernels, with blocks of 128."""
    return {
        name: Problem(
            name,
            *one.sizes,
            HEADS,
            HEADS,
            score_mod=one.score_mod,
            mask_mod=one.mask_mod or fa4.masks.causal,
            trained=one.trained,
            call=dict(block_mask=one.by_blocks(fa4.create_block_mask, device)),
        )
        for name, one in make(device).items()
    }
