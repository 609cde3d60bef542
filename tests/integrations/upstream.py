"""What transformers' own tests of models say with fa4 in the place of its default attention.

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    python -m tests.integrations.upstream transformers-5.23.0/tests

The source distribution has the tests that all models share (`test_modeling_common.py`), and neither those of single
models nor of generate(). Here they run on small configurations of the models of `test_transformers`, on a CPU, twice:
with torch's scaled_dot_product_attention behind the name "sdpa", and with fa4 behind that name. Gemma 2 and gpt-oss
decline "sdpa", which has neither softcap nor sinks; of fa4 they are told that they need not. It prints how many pass,
fail and are skipped, each test whose outcome differs or that fails, and why tests are skipped. Needs `parameterized`.
"""

import collections
import importlib
import re
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers

import fa4
from fa4.integrations import transformers as ours
from tests.integrations.models import MODELS, SIZES

STUBS = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "gemma2": "Gemma2", "gpt_oss": "GptOss", "qwen3": "Qwen3"}


class Small:
    """What the shared tests ask of a model's own: a configuration and inputs."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = (
        SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )

    def __init__(self, name: str) -> None:
        self.name = name

    def get_config(self) -> Any:
        return getattr(transformers, MODELS[self.name].config)(**SIZES | MODELS[self.name].extra)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape = self.batch_size, self.seq_length
        tokens = torch.randint(3, SIZES["vocab_size"], shape)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones(shape).tril().long()}


def shared_tests(folder: Path) -> type:
    """transformers' ModelTesterMixin, as a part of a package in which what is missing is empty."""
    root = Path(tempfile.mkdtemp())
    package = root / "upstream_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    for path in folder.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    for module, name in STUBS.items():
        path = package.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(f"class {name}:\n    pass\n")
    sys.path.insert(0, str(root))
    common = importlib.import_module("upstream_tests.test_modeling_common")
    return type("Shared", (common.ModelTesterMixin, common.GenerationTesterMixin), {})


def suite(mixin: type) -> unittest.TestSuite:
    tests = unittest.TestSuite()
    for name, prefix in CLASSES.items():
        models = tuple(getattr(transformers, prefix + kind) for kind in ("Model", "ForCausalLM"))

        def set_up(self: Any, name: str = name) -> None:
            self.model_tester = Small(name)

        of_model = type(name, (mixin, unittest.TestCase), {"setUp": set_up, "all_model_classes": models})
        tests.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(of_model))
    return tests


class Outcomes(unittest.TestResult):
    """Of each test: "passed", or what came of it and why."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, tuple[str, str]] = {}

    @staticmethod
    def _name(test: Any) -> str:
        return f"{type(getattr(test, 'test_case', test)).__name__}: {test.id().split('.')[-1]}"

    def addSuccess(self, test: Any) -> None:
        self.of.setdefault(self._name(test), ("passed", ""))

    def addSkip(self, test: Any, reason: str) -> None:
        self.of[self._name(test)] = "skipped", reason

    def addFailure(self, test: Any, err: Any) -> None:
        self.of[self._name(test)] = "failed", f"{err[0].__name__}: {err[1]}".strip().splitlines()[0][:160]

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)


def outcomes(mixin: type, attention: Any, mask: Any) -> tuple[dict[str, tuple[str, str]], int]:
    """And how often attention was called."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return attention(*args, **kwargs)

    transformers.AttentionInterface._global_mapping["sdpa"] = counted
    transformers.AttentionMaskInterface._global_mapping["sdpa"] = mask
    result = Outcomes()
    suite(mixin).run(result)
    return result.of, calls


def main() -> None:
    mixin = shared_tests(Path(sys.argv[1]))
    attentions, masks = (
        transformers.AttentionInterface._global_mapping,
        transformers.AttentionMaskInterface._global_mapping,
    )
    theirs, _ = outcomes(mixin, attentions["sdpa"], masks["sdpa"])
    fa4.register_transformers()
    for prefix in CLASSES.values():
        for kind in ("Model", "ForCausalLM"):
            getattr(transformers, prefix + kind)._supports_sdpa = True
    got, calls = outcomes(mixin, ours.attention, ours.mask)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}; fa4 was called {calls} times")
    for name, of in (("torch's", theirs), ("fa4", got)):
        counts = collections.Counter(outcome for outcome, _ in of.values())
        print(f"{name}: {len(of)} tests, " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    for name, (outcome, why) in got.items():
        before, reason = theirs.get(name, ("not run", ""))
        if outcome != before or outcome == "failed":
            print(f"{name}: {outcome} {why}; torch's {before} {reason}")
    print("skipped with fa4, by reason:")
    reasons = collections.Counter(
        re.sub(r"(<class '[^']*'>|\b[A-Z]\w*(Model|ForCausalLM)\b)", "the model", why)
        for outcome, why in got.values()
        if outcome == "skipped"
    )
    for why, n in reasons.most_common():
        print(f"{n:4}  {why}")


if __name__ == "__main__":
    main()
