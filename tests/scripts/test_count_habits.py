"""Which moves of a conversation on FrozenLake count as which habit."""

import pytest

from scripts import count_habits

FORK = "P F F\nH F H\nF F G\nleft wall down H right F up wall"
DEAD_END = "F F P\nH F H\nF F G\nleft F down H right wall up wall"
MIDDLE = "F P F\nH F H\nF F G\nleft F down F right F up wall"


def said(*turns: tuple[str, str]) -> str:
    """The tool's description, as each prompt has it, then an observation and a move a turn."""
    call = '<tool_call>\n{{"name": "move", "arguments": {{"direction": "{}"}}}}\n</tool_call>'
    text = '{"properties": {"direction": {"type": "string", "enum": ["left", "down"]}}}\n'
    return text + "".join(f"{lake}\n{call.format(move)}\n" for lake, move in turns)


def shares(*turns: tuple[str, str]) -> dict[str, str]:
    found = count_habits.Shares()
    for move in count_habits.moves(said(*turns)):
        count_habits.count_move(*move, found)
    return {name: found.text(name) for name in ("forward", "hole", "back", "fork")}


def test_each_move_is_paired_with_the_lake_before_it():
    found = count_habits.moves(said((FORK, "right"), (MIDDLE, "down")))
    told = [("".join(rows[0]), beside["down"], move) for rows, beside, move in found]
    assert told == [("PFF", "H", "right"), ("FPF", "F", "down")]


@pytest.mark.parametrize(
    "move, expected",
    [
        ("down", {"forward": "100%", "hole": "100%", "back": "0%", "fork": "-"}),
        ("right", {"forward": "100%", "hole": "0%", "back": "0%", "fork": "-"}),
        ("left", {"forward": "0%", "hole": "0%", "back": "100%", "fork": "-"}),
        ("up", {"forward": "0%", "hole": "0%", "back": "0%", "fork": "-"}),
    ],
)
def test_a_dead_end_is_left_by_a_step_back_only(move, expected):
    assert shares((DEAD_END, move)) == expected


def test_a_folder_without_trajectories_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        count_habits.main([str(tmp_path)])
    assert refused.value.code == 2 and "give the folder of a run" in capsys.readouterr().err
