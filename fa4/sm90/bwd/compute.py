"""Compute role, two warpgroups: each has 64 keys, a thread two of them with a quarter of a step's queries; finally dV
and dK.

Waits:   load_compute_{K,V,Q,dO}.full, compute_compute_dS.full, compute_reduce_dQ.free
Signals: load_compute_{Q,dO}.free, compute_compute_dS.full, compute_reduce_dQ.full
"""

from __future__ import annotations

import cutlass.cute as cute

from ...pipeline.cursor import consume
from .epilogue import stage_gradients, store_gradients
from .steps import all_steps
from .team import team_of
from .work import work_tile


@cute.jit
def compute(context):
    work, team = work_tile(context), team_of(context)
    team.dv.fill(0.0)
    team.dk.fill(0.0)
    if work.steps > 0:
        consume(team.ends.load_compute_K).wait()
        all_steps(context, team, work)
    else:
        stage_gradients(context, work, team)
    store_gradients(context, work, team)
