"""Output of commands as pages show it, and its comparison with the output of a run."""

import re


def shown(page: str, comment: str, language: str = r"\w+") -> str:
    """Return the code block of a page that follows `<!-- comment -->`."""
    return re.search(rf"<!-- {comment} -->\n```{language}\n(.*?)```", page, re.S)[1]


def comparable(text: str, folder: str, suffix: str) -> str:
    """Remove addresses, folders before `folder`, and lines and counts that depend on the version of the compiler.

    suffix: of the source files, such as "py".
    """
    text = re.sub(rf"\S*{re.escape(folder)}", folder, re.sub(r"0x[0-9a-f]+", "ADDRESS", text))
    text = re.sub(rf"ptx line \d+: .*?, (?=\S+\.{suffix}:)", "", text)
    text = re.sub(r"[\d,]+ (?=warp-instructions|times)", "N ", text)
    return re.sub(r"kernel_cutlass_\S+", "KERNEL", text).strip()


def command_of(block: str) -> tuple[list[str], str]:
    """Return the arguments of `$ warpcheck ...` in the first line of a block, and the output after it."""
    command, _, output = block.partition("\n")
    return [word.strip("'") for word in command.removeprefix("$ warpcheck ").split()], output
