"""Where a role stands in a channel: which phase it waits for first, and what a cursor refuses."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.pipeline.channels import By, Carries, Channel, ChannelTable
from fa4.pipeline.cursor import ALL, Lane, consume, produce
from fa4.pipeline.ends import Ends
from fa4.pipeline.roles import Role, RoleTable

ROLES = RoleTable((Role("load", (0, 1), 64), Role("multiply", (1, 2), 64)))
TABLE = ChannelTable(
    (
        Channel("load_multiply_K", "load", "multiply", By.TMA, By.WARP, 3, Carries.ASYNC_SMEM),
        Channel("load_multiply_Q", "load", "multiply", By.TMA, By.WARP, 2, Carries.ASYNC_SMEM),
        Channel("load_multiply_V", "load", "multiply", By.TMA, By.WARP, 4, Carries.ASYNC_SMEM),
    ),
    ROLES,
)
LOAD, MULTIPLY = Ends(TABLE, "load", 0), Ends(TABLE, "multiply", 0)


@pytest.mark.parametrize(
    "cursor, phase",
    [
        (consume(MULTIPLY.load_multiply_K), 0),
        (produce(LOAD.load_multiply_K), 1),
        (produce(LOAD.load_multiply_Q, ALL, ahead=1), 0),  # its first two stages are taken without a wait
        (produce(LOAD.load_multiply_Q, ALL, ahead=2), 1),
    ],
)
def test_the_first_phase_follows_from_the_side(cursor, phase):
    assert cursor.first_phase == phase


def test_channels_in_step_share_a_phase():
    """Only a cursor that walks through a ring carries its stage from one turn to the next."""
    queries = consume(MULTIPLY.load_multiply_Q, ALL)
    assert queries.at_iteration_of(produce(LOAD.load_multiply_Q, 1)).stage == 1
    keys = consume(MULTIPLY.load_multiply_K)
    assert len(keys._carried()) == 2
    assert keys.at_iteration_of(consume(MULTIPLY.load_multiply_K)).stage is keys.stage
    assert len(queries._carried()) == len(consume(MULTIPLY.load_multiply_Q, 1)._carried()) == 1


def test_a_cursor_in_step_keeps_to_its_lane():
    lane = consume(MULTIPLY.load_multiply_V, Lane(1, 2))
    other = lane.at_iteration_of(produce(LOAD.load_multiply_V, Lane(1, 2)))
    assert (other.step, other.stage) == (2, lane.stage)


@pytest.mark.parametrize(
    "misuse, complaint",
    [
        (lambda: consume(MULTIPLY.load_multiply_K, Lane(0, 2)), "3 stages have no 2 lanes"),
        (
            lambda: consume(MULTIPLY.load_multiply_K).at_iteration_of(consume(MULTIPLY.load_multiply_Q, 0)),
            "do not go in step",
        ),
        (
            lambda: consume(MULTIPLY.load_multiply_V, Lane(0, 2)).at_iteration_of(consume(MULTIPLY.load_multiply_V)),
            "other rings or lanes do not go in step",
        ),
        (lambda: consume(MULTIPLY.load_multiply_Q, ALL).wait(), "asked about None"),
        (lambda: consume(MULTIPLY.load_multiply_Q, 0).wait(1), "asked about 1"),
        (lambda: produce(MULTIPLY.load_multiply_K).wait(), "multiply is used as a producer"),
        (lambda: consume(LOAD.load_multiply_K).wait(), "load is used as a consumer"),
    ],
)
def test_a_cursor_refuses(misuse, complaint):
    with pytest.raises(ValueError, match=complaint):
        misuse()
