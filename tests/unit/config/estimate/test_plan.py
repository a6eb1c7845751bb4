"""The plan: widths checked with paths, memory and work by the stated rules, JSON, and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from caramba.config.estimate import as_json, check_widths, model_cost, plan, render_text
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelConfig
from caramba.config.parallel import ClusterConfig, LauncherConfig, ParallelConfig
from caramba.errors import ConfigError
from tests.unit.config.estimate.presets import compose_model, manifest, phase

UPCYCLE = (
    phase("pretrain", trains="teacher"),
    phase("blockwise", trainable="all"),
    phase("global", objective="kl", block_size=128),
)


def model(*layers, **fields) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "embedder": {"vocab_size": 100, "d_model": 64},
            "topology": {"type": "StackedTopology", "layers": list(layers)},
            **fields,
        }
    )


NORM = {"type": "RMSNormLayer", "d_model": 64}
WIDEN = {"type": "LinearLayer", "d_in": 64, "d_out": 128}


class TestWidths:
    def test_path_source_and_fix(self):
        block = {"type": "ResidualTopology", "layers": [NORM, {**NORM, "d_model": 128}]}
        with pytest.raises(ConfigError) as caught:
            check_widths(model(NORM, NORM, NORM, block))
        assert str(caught.value) == (
            "model.topology.layers[3].layers[1]: expects width 128, got 64 from layers[3].layers[0]; set d_model: 64"
        )

    def test_the_embedder_is_a_source(self):
        with pytest.raises(ConfigError, match=r"layers\[0\]: expects width 128, got 64 from the embedder"):
            check_widths(model({**NORM, "d_model": 128}))

    @pytest.mark.parametrize(
        ("last", "got"),
        [(WIDEN, "128"), ({"type": "ParallelTopology", "layers": [NORM, NORM]}, "a stack of 2 x 64")],
    )
    def test_the_head_needs_the_embedders_width(self, last, got):
        expected = rf"model\.topology: feeds the head: expects width 64 out, the embedder's, got {got} from layers\[1\]"
        with pytest.raises(ConfigError, match=expected):
            check_widths(model(NORM, last))

    def test_the_teacher_is_checked_too(self):
        teacher = {"manifest": model(WIDEN)}
        with pytest.raises(ConfigError, match=r"^model\.teacher\.manifest\.topology: feeds the head"):
            check_widths(model(NORM, teacher=teacher))


class TestModelCost:
    def test_untied_head_and_positions(self):
        embedder = {"type": "token_position", "vocab_size": 100, "d_model": 64, "max_positions": 32}
        cost = model_cost(model(NORM, embedder=embedder, head={"tied": False, "bias": True}))
        assert cost.embedder_params == (100 + 32) * 64
        assert cost.head_params == 100 * 64 + 100
        assert cost.params == sum(cost.params_per_part.values()) == 132 * 64 + 6500 + 64

    def test_flops_of_a_norm_are_the_heads(self):
        assert model_cost(model(NORM)).flops_per_token(8) == 2 * 100 * 64

    def test_attention_flops_are_part_of_the_whole(self):
        cost = model_cost(compose_model("tiny"))
        mlp = 4 * 2 * 3 * 128 * 384
        assert cost.attention_flops_per_token(64) + mlp + 2 * 2048 * 128 == pytest.approx(cost.flops_per_token(64))


class TestStages:
    def test_memory_follows_the_stated_rules(self):
        made = plan(manifest("tiny_dba", *UPCYCLE))
        teacher, student = made.teacher, made.student
        pretrain, blockwise, distil = (stage.estimate for stage in made.stages)
        assert pretrain.memory.weights_bytes == pretrain.memory.gradients_bytes == 4 * teacher.params
        assert pretrain.memory.optimizer_bytes == 8 * teacher.params
        assert pretrain.memory.activations_bytes == 4 * 64 * 4 * teacher.activation_elements
        assert blockwise.trained_params == student.attention_params == student.params_per_part["attention"]
        assert blockwise.memory.weights_bytes == 4 * (teacher.params + student.params)
        assert blockwise.memory.optimizer_bytes == 8 * student.attention_params
        assert distil.trained_params == student.params
        assert distil.memory.activations_bytes == 4 * 128 * 4 * (student.activation_elements + teacher.vocab_size)
        assert blockwise.memory.activations_bytes < pretrain.memory.activations_bytes / 10

    def test_wide_keys_count_in_two_parts_where_their_kernel_is_known_to_run(self):
        half = {"dtype": "bfloat16", "use_amp": True}
        made = manifest("llama32_dba", phase("blockwise", **half), phase("global", objective="ce", **half))
        joined = plan(made)
        student, tokens = joined.student, 4 * 64
        spared = student.topology.spared_elements
        assert spared == 16 * (32 * (64 + 3 * 256) - 256)
        for device, kernels, fewer in (
            ("cuda", "auto", True),
            ("cuda", "reference", False),
            ("cpu", "auto", False),
        ):
            found = plan(made.model_copy(update={"device": device, "kernels": kernels}))
            for stage, before, elements in zip(found.stages, joined.stages, (spared // 16, spared), strict=True):
                less = before.estimate.memory.activations_bytes - stage.estimate.memory.activations_bytes
                assert less == (2 * tokens * elements if fewer else 0)
                assert ("wide keys count in two parts" in stage.note) is fewer
        for preset, way in (
            ("llama32_dba", {}),
            ("llama32_dba_384b", half),
        ):  # float32 as far as is known; narrow keys
            made = manifest(preset, phase("global", objective="ce", **way))
            stages = [plan(made.model_copy(update={"device": device})).stages[0] for device in ("cuda", "auto")]
            assert stages[0] == stages[1]

    def test_blockwise_work_is_one_teacher_pass_and_attention(self):
        made = plan(manifest("tiny_dba", phase("blockwise", trainable="all")))
        [stage] = made.stages
        work = 3 * made.student.attention_flops_per_token(64) + made.teacher.topology.flops_per_token(64)
        assert stage.estimate.flops_per_token == pytest.approx(work)
        assert stage.tokens == 10 * 4 * 64
        assert stage.total_flops == pytest.approx(work * stage.tokens)

    def test_copied_weights_that_stay_take_neither_gradients_nor_work(self):
        choices = (phase("blockwise", trainable=name) for name in ("all", "maps", "auto"))
        everything, maps, auto = (plan(manifest("tiny_dba", one)).stages[0].estimate for one in choices)
        assert auto == maps
        copied = 4 * (128 * 4 * 32 + 4 * 32 * 128)  # W_q and W_o of four layers
        assert everything.trained_params - maps.trained_params == copied
        assert everything.memory.optimizer_bytes - maps.memory.optimizer_bytes == 8 * copied
        assert everything.flops_per_token - maps.flops_per_token == 2 * copied

    def test_weights_in_bfloat16_take_half_and_masters_four_bytes_more_or_none(self):
        halved = {"dtype": "bfloat16", "use_amp": False}
        masters = ({"stochastic_rounding": True}, {"master_weights": True}, {"master_weights": "in_moments"})
        ways = ({}, halved, *({**halved, **way} for way in masters))
        made = [plan(manifest("tiny", phase("pretrain", **way))) for way in ways]
        params = made[0].student.params
        found = [one.stages[0].estimate.memory for one in made]
        assert [one.weights_bytes // params for one in found] == [4, 2, 2, 2, 2]
        assert [one.gradients_bytes // params for one in found] == [4, 2, 2, 2, 2]
        assert [one.optimizer_bytes // params for one in found] == [8, 4, 8, 12, 8]
        held = [one.total_bytes - one.activations_bytes for one in found]
        assert held == [16 * params, 8 * params, 12 * params, 16 * params, 12 * params]
        assert found[0].activations_bytes > found[1].activations_bytes

    def test_ranks_hold_their_part(self):
        """Of fsdp2 an eighth and what is gathered, of tp half of each layer, of a pipeline its first stage's blocks."""

        def on(parallel, **launcher):
            changes = {"parallel": ParallelConfig(**parallel), "launcher": LauncherConfig(**launcher)}
            return plan(manifest("tiny", phase("pretrain")).model_copy(update=changes)).stages[0]

        alone, model = on({}), model_cost(compose_model("tiny"))
        layers = model.params_per_part["attention"] + model.params_per_part["feed-forward"]
        sharded = on({"strategy": "fsdp2", "dp": 8})
        assert sharded.estimate.memory.weights_bytes == alone.estimate.memory.weights_bytes // 8
        assert sharded.estimate.memory.optimizer_bytes == alone.estimate.memory.optimizer_bytes // 8
        block = (layers + model.params_per_part["norms"] - 128) // 4
        assert sharded.estimate.memory.gathered_bytes == 8 * (model.embedder_params + 128) + 4 * 3 * block
        assert (sharded.tokens, sharded.total_flops) == (8 * alone.tokens, 8 * alone.total_flops)
        nodes = on({"strategy": "fsdp2"}, type="slurm", nodes=2, nproc_per_node=4)
        assert nodes.estimate.memory.weights_bytes == alone.estimate.memory.weights_bytes // 4, "replicas"
        assert nodes.tokens == sharded.tokens
        split = {"strategy": "fsdp2_tp", "dp": 1, "tp": 2}
        halves = on(split)
        assert halves.estimate.memory.weights_bytes == 4 * (model.params - layers // 2)
        assert halves.tokens == alone.tokens
        kept = [
            one.estimate.memory.activations_bytes for one in (alone, halves, on({**split, "sequence_parallel": True}))
        ]
        assert kept[0] > kept[1] > kept[2] > kept[0] / 2
        stages = on({"strategy": "pipeline", "pp": 2, "num_micro_batches": 4}).estimate.memory
        assert stages.weights_bytes == 2 * (layers + model.params_per_part["norms"] - 128) + 4 * (
            model.embedder_params
        ), "the first stage, with two of four micro-batches alive"
        text = render_text(
            plan(manifest("tiny", phase("pretrain")).model_copy(update={"parallel": ParallelConfig(strategy="fsdp2")}))
        )
        assert "parallel.dp auto: memory and tokens are for dp=1" in text
        assert "gathered" not in text

    def test_dp_auto_counts_nodes_only_where_the_ranks_of_one_are_known(self):
        """By what a SLURM job asks for, as the job itself counts; else it is planned, and said to be, as one rank."""

        def on(gpus: int | str | None, device: str = "auto", **parallel: object):
            changes = {
                "parallel": ParallelConfig.model_validate({"strategy": "fsdp2", **parallel}),
                "launcher": LauncherConfig(type="slurm", nodes=2),
                "cluster": ClusterConfig(gpus=gpus),
                "device": device,
            }
            stage = plan(manifest("tiny", phase("pretrain")).model_copy(update=changes)).stages[0]
            return (
                stage.tokens,
                stage.estimate.memory.weights_bytes,
                "memory and tokens are for dp=1" in stage.note,
            )

        alone = plan(manifest("tiny", phase("pretrain"))).stages[0]
        tokens, weights = alone.tokens, alone.estimate.memory.weights_bytes
        assert on(4) == on("h100:4") == (8 * tokens, weights // 4, False), "replicas of four shards"
        assert on(None) == on("h100") == on(4, "cpu") == (tokens, weights, True)
        assert on(None, dp=8) == (8 * tokens, weights // 4, False)
        split = {"strategy": "fsdp2_tp", "tp": 2}
        assert [on(gpus, **split)[0] for gpus in (5, 1)] == [4 * tokens, tokens], "two of five ranks by two"
        assert [on(gpus, **split)[2] for gpus in (5, 1)] == [False, True]

    def test_steps_of_the_run_and_of_debug(self):
        run = {**phase("pretrain"), "steps": 50}
        experiment = manifest("tiny", run)
        assert plan(experiment).stages[0].steps == 50
        debugged = experiment.model_copy(update={"debug": experiment.debug.model_copy(update={"max_steps": 3})})
        assert plan(debugged).stages[0].tokens == 3 * 4 * 64

    def test_notes_say_what_is_skipped_or_not_counted(self):
        made = plan(manifest("llama32_dba", phase("pretrain", trains="teacher"), phase("blockwise", batch_size="auto")))
        assert made.stages[0].note == "skipped: the teacher comes from meta-llama/Llama-3.2-1B"
        first = made.stages[0]
        assert (first.steps, first.tokens, first.total_flops, first.estimate) == (0, 0, 0.0, None), "not priced"
        assert made.stages[1].tokens is None
        assert "memory is for a batch of 1" in made.stages[1].note

    def test_a_budget_is_said_to_choose_other_widths(self):
        experiment = manifest("tiny_dba", phase("blockwise"))
        surgery = experiment.model.surgery.model_copy(update={"kv_budget_bytes": 1200})
        model = experiment.model.model_copy(update={"surgery": surgery})
        (note,) = plan(experiment.model_copy(update={"model": model})).notes
        assert "chooses the widths of each layer under 1,200 bytes a token" in note

    def test_a_teacher_without_description_is_said_not_to_count(self):
        experiment = manifest("tiny_dba", phase("blockwise"))
        teacher = experiment.model.teacher.model_copy(update={"manifest": None, "checkpoint": "runs/x"})
        bare = experiment.model_copy(update={"model": experiment.model.model_copy(update={"teacher": teacher})})
        made = plan(bare)
        assert made.teacher is None
        assert "the teacher is not counted" in made.stages[0].note
        assert "described by its checkpoint, runs/x" in render_text(made)
        assert all(row.ratio is None for row in made.cache)


class TestCache:
    def test_configured_formats_join_the_usual_ones(self):
        bench = {"id": "m", "config": {"type": "memory", "quantization_modes": ["fp32", "q8"]}}
        made = plan(manifest("tiny_dba", benchmarks=[bench]))
        assert [str(row.kind) for row in made.cache] == ["fp16", "q8_0", "q4_0", "nf4", "mixed", "fp32"]
        assert made.notes == ()
        assert made.cache[0].ratio == made.cache[0].student_total / made.cache[0].teacher_total

    def test_json_is_plain_and_exact(self):
        made = plan(manifest("llama32_dba_per_head", *UPCYCLE), "caramba launch model=llama32_dba_per_head")
        tree = json.loads(json.dumps(as_json(made), allow_nan=False))
        assert tree["teacher"]["params"] == 1_235_814_400
        assert tree["cache"][0]["student_bytes_per_token_layer"] == [1792] * 16
        assert tree["cache"][0]["ratio_student_over_teacher"] == 0.875
        assert tree["context"] == 128
        assert tree["stages"][1]["memory"]["total_bytes"] == made.stages[1].estimate.memory.total_bytes
        nested = tree["student"]["topology"]["layers"][0]
        assert (nested["repeat"], nested["layers"][0]["layers"][1]["cached_streams"][0]["name"]) == (
            16,
            "k_sem",
        )


class TestRendering:
    def test_a_repeated_block_is_printed_once(self):
        text = render_text(plan(manifest("llama32_dba", *UPCYCLE), "caramba launch model=llama32_dba"))
        assert text.count("NestedTopology x16  [B,T,2048]") == 2
        assert text.count("SwiGLULayer") == 2
        assert "1,235,814,400 (1.24B) parameters, from meta-llama/Llama-3.2-1B" in text
        assert "Run it: caramba launch model=llama32_dba\n" in text

    @pytest.mark.parametrize("preset", ["tiny_dba", "tiny_dba_per_head", "llama32_dba_per_head", "dba"])
    def test_fits_in_110_columns_without_control_sequences(self, preset):
        runs = UPCYCLE if preset != "dba" else (phase("pretrain"),)
        text = render_text(plan(manifest(preset, *runs)))
        assert max(map(len, text.splitlines())) <= 110
        assert "\x1b" not in text
        assert "…" not in text

    def test_cache_table_shows_both_ratios(self):
        text = render_text(plan(manifest("llama32_dba_384b")))
        rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()[:1]}
        header = next(line for line in text.splitlines() if line.strip().startswith("format"))
        assert header.split()[-4:] == ["student/teacher", "smaller", "than", "fp16"]
        assert rows["fp16"] == ["2,048", "32,768", "384", "6,144", "0.1875", "5.33x", "5.33x"]
        assert rows["mixed"] == ["576", "9,216", "140", "2,240", "0.2431", "4.11x", "14.6x"]
        assert "No training stages." in text

    def test_shared_weights_are_said(self):
        cyclic = {"type": "CyclicTopology", "n_cycles": 4, "layers": [NORM]}
        stacked = {"type": "ParallelTopology", "layers": [NORM, NORM]}
        reduce = {"type": "LinearLayer", "d_in": 64, "d_out": 64, "reduce": "mean"}
        experiment = manifest("dba").model_copy(update={"model": model(cyclic, stacked, reduce)})
        text = render_text(plan(experiment))
        assert "CyclicTopology x4, shared weights  [B,T,64]" in text
        assert "ParallelTopology  [B,T,64] -> [B,T,2,64]" in text


def test_planning_loads_neither_torch_nor_hydra_nor_numpy():
    code = (
        "import sys; from caramba.config.estimate import plan, render, as_json, check_widths;"
        "print(sorted({'torch', 'lightning', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_kinds_of_one_stream_agree_with_the_table():
    cost = model_cost(compose_model("llama32_dba"))
    streams = {kind: cost.kv_bytes_per_layer(kind)[0] for kind in (KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4)}
    assert streams == {KVCacheKind.Q8_0: 408, KVCacheKind.Q4_0: 216, KVCacheKind.NF4: 216}
