"""The faults that tools/mutants plants.

The old text is in its file exactly once, so keep it short: tests/tools/mutants_test.py
notices when it is not. A fault stays in one .cc file, which alone is compiled again, and
compiles without a warning. Faults of one test binary are neighbours.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    target: str  # of a test binary
    source: str  # of the test, in the target's folder
    test: str    # Suite.Name, of a parametrised one all or Suite.Name/Parameter
    why: str     # what the fault does


LAYOUT = "//tests/state:shard_layout_test"
STATE = "//tests/state:state_test"
HOOKS = "//tests/hooks:hooks_test"
COLLECTIVES = "//tests/collectives:collectives_test"
AGREEMENT = "//tests/collectives:agreement_test"
ORDER = "//tests/composable:order_test"
BOUNDARY = "//tests/composable:boundary_test"
INTERFACE = "//tests/composable:interface_test"
SEMANTICS = "//tests/composable:semantics_test"
ROBUSTNESS = "//tests/composable:robustness_test"
MESH = "//tests/parity:mesh_parity_test"

MUTANTS = [
    Mutant("row-boundary-off-by-one", "state/shard_layout.cc",
           "std::clamp(begin + shard_numel_, ",
           "std::clamp(begin + shard_numel_ - 1, ",
           LAYOUT, "shard_layout_test.cc", "ShardLayoutTest.OddRowsOnThreeRanks",
           "A rank's range ends one element early."),
    Mutant("shards-padded-to-16-bytes", "state/shard_layout.cc",
           "wide_unit_(128 / std::gcd(int64_t{128}, options.itemsize))",
           "wide_unit_(unit_)",
           LAYOUT, "shard_layout_test.cc",
           "ShardLayoutTest.ShardIsAlignedTo128BytesWhereCheap",
           "Shards are padded to the small unit only."),

    Mutant("divide-skipped", "state/reduction_chain.cc",
           "shard.div_(link.divide.reduction);",
           "shard.div_(1);",
           STATE, "gradient_reduction_test.cc", "GradientReductionTest.MeanOverTheRanks",
           "Gradients are the sum over the ranks."),
    Mutant("payload-tail-dropped", "state/gradient_reduction.cc",
           "begin += count;",
           "begin = param.numel();",
           STATE, "gradient_reduction_test.cc",
           "GradientReductionTest.GradientsWithOtherStrides",
           "Of a parameter that several ranks hold, only the first rank's rows are sent."),
    Mutant("payload-gap-not-zeroed", "state/gradient_reduction.cc",
           "skip_to(rank, local);\n",
           "\n",
           STATE, "gradient_reduction_test.cc",
           "GradientReductionTest.GapsAreZeroOnAPoisonedBuffer",
           "What the buffer held before is summed between the parameters."),
    Mutant("flags-ignored", "state/gradient_reduction.cc",
           "return flags.const_data_ptr<double>()[k] != 0;",
           "return flags.const_data_ptr<double>()[k] < 0;",
           STATE, "gradient_reduction_test.cc",
           "GradientReductionTest.AnyRankWithAGradientGivesAllRanksOne",
           "A rank without a gradient of its own gets none from the others."),
    Mutant("state-leaked", "state/contract_registry.cc",
           "state->owned_by_modules() ? nullptr : state",
           "state",
           STATE, "contract_registry_test.cc",
           "ContractRegistryTest.HoldsStatesThatModulesOwnWeakly",
           "The registry keeps states that their modules own."),

    Mutant("dirty-mark-not-set", "state/fsdp_param_group.cc",
           "  dirty_ = true;\n",
           "",
           HOOKS, "guard_test.cc", "GuardTest.WritingAShardMakesTheGatheredValuesStale",
           "A write to a shard leaves the gathered values trusted."),
    Mutant("version-not-bumped", "state/fsdp_param_group.cc",
           "if (whole.defined()) internal::BumpVersion(whole);",
           "",
           HOOKS, "guard_test.cc",
           "GuardTest.StepBetweenForwardAndBackwardIsAutogradsOwnError",
           "Autograd does not notice that a parameter it saved has changed."),
    Mutant("edge-not-cleared", "state/fsdp_param_group.cc",
           "wanted ? Sink() : NodePtr()",
           "Sink()",
           HOOKS, "life_cycle_test.cc", "FreezingTest.ShardsDecide",
           "A parameter that was frozen keeps its gradient edge."),
    Mutant("gather-not-waited-for", "hooks/pre_forward.cc",
           "  WaitUnshard(context, needed);\n",
           "",
           HOOKS, "guard_test.cc", "GuardTest.ReadingGathersTheGroup",
           "An operator of forward runs while its parameters are on the wire."),
    Mutant("left-group-evicted-too-early", "hooks/unshard.cc",
           "use > victim_use",
           "use < victim_use",
           HOOKS, "slots_test.cc",
           "SlotsTest.TheOneNeededLastMakesRoomWhereTheOrderIsKnown",
           "The left group that is needed first makes room."),

    Mutant("wait-lost", "collectives/communicator.cc",
           "if (work_ != nullptr) WaitForWork();",
           "",
           COLLECTIVES, "communicator_test.cc",
           "CommunicatorRulesTest.EachWaitThrowsWhatTheCollectiveFailedWith",
           "A collective is taken for done, and for well, once it was started."),
    Mutant("mismatch-agreed-to", "collectives/agreement.cc",
           "store_->add(SameKey(*next), 0) == size_",
           "store_->add(SameKey(*next), 0) > 0",
           AGREEMENT, "agreement_test.cc", "OrderAgreementTest.DifferentFromTheStart",
           "Ranks that are about to run different collectives agree."),

    Mutant("order-not-recorded", "hooks/pre_forward.cc",
           "if (training) order.Record(state->id);",
           "",
           ORDER, "order_test.cc", "OrderTest.ThreeBlocks",
           "No forward is known to the next one, and nothing is gathered ahead."),

    Mutant("boundary-does-not-leave", "hooks/forward_scope.cc",
           "  state.left = true;\n",
           "",
           BOUNDARY, "boundary_test.cc",
           "BoundaryPointsTest.LeftAtTheEndThoughNothingElseIsRead",
           "A module whose forward has ended keeps its slot."),

    Mutant("norm-of-one-rank", "composable/clip_grad_norm.cc",
           "norm.OverRanks(part)",
           "part.value",
           INTERFACE, "clip_grad_norm_test.cc",
           "ClipGradNormTest.EqualsUnshardedNormAndScaling",
           "Each rank clips by the norm of its own rows."),
    Mutant("stale-copy-after-load", "composable/state_dict.cc",
           "    group.MarkAllDirty();\n",
           "",
           INTERFACE, "state_dict_test.cc", "StateDictTest.LoadsIntoThisNumberOfRanks",
           "What was gathered before load_full_state_dict is used after it."),
    Mutant("set-data-ignored", "state/fsdp_param_group.cc",
           "param.RowsIn(segment.flat_shard).copy_(data);",
           "param.RowsIn(segment.flat_shard);",
           INTERFACE, "separation_test.cc", "SetDataTest.OnShardsTrainsAsOnWholes",
           "Rows given to a shard with set_data go nowhere."),
    Mutant("snapshot-unchecked", "hooks/root_pre_forward.cc",
           "context.snapshot.Check(context.roots);",
           "",
           INTERFACE, "separation_test.cc",
           "CutOffTest.NamesTheParameterAndTheFix/RegisteredAfterwards",
           "Parameters registered after fully_shard are not noticed."),
    Mutant("clone-not-tagged", "hooks/guard.cc",
           "internal::AddGuard(result);",
           "(void)result;",
           INTERFACE, "separation_test.cc",
           "CutOffTest.NamesTheParameterAndTheFix/UseOfACloneWithoutGrad",
           "A clone of a sharded module computes with this rank's rows."),

    Mutant("shard-hooks-run-twice", "state/shard_gradient.cc",
           "  rows = RunShardHooks(shard, std::move(rows));\n",
           "  rows = RunShardHooks(shard, RunShardHooks(shard, std::move(rows)));\n",
           SEMANTICS, "idioms_test.cc",
           "IdiomTest.IsRightOrNamesTheFix/HookOnAShardSeesReducedRowsOnce",
           "A hook on a shard is called twice for one gradient."),
    Mutant("tied-entry-not-replaced", "state/managed_params.cc",
           "        entry.shard;\n",
           "        entry.whole;\n",
           SEMANTICS, "tied_test.cc", "TiedTest.StaysOneTensor",
           "The second entry of a tied parameter stays the whole."),

    Mutant("abort-leaves-gathers", "hooks/root_post_backward.cc",
           "  ReshardAll(context);\n  Transition(&context.training_state, TreeEvent::kAbort);",
           "  context.running_backward.reset();\n"
           "  Transition(&context.training_state, TreeEvent::kAbort);",
           ROBUSTNESS, "exceptions_test.cc", "ExceptionTest.InANodeBetweenTwoLayers",
           "An exception leaves groups gathered."),
    Mutant("undo-forgets-ties", "composable/fully_shard.cc",
           "{ UntieFromShards(tied); }",
           "{ (void)tied; }",
           ROBUSTNESS, "transactions_test.cc",
           "TransactionTest.ATiedEntryIsTheWholeAgain",
           "A fully_shard that throws leaves tied entries replaced."),

    Mutant("partial-lost", "state/reduction_chain.cc",
           "link.output.add_(link.partial);",
           "",
           MESH, "hsdp_test.cc",
           "HybridPartialTest.OfOtherParametersThanTheLastBackward",
           "What was reduced without the replicas is forgotten."),
    Mutant("replicas-left-apart", "state/reduction_chain.cc",
           "if (replicate->size() == 1) continue;",
           "if (replicate->size() >= 1) continue;",
           MESH, "hsdp_test.cc", "HybridTest.OneGroupIsOneReductionOfEachKind",
           "Each replica keeps its own gradients."),
    Mutant("stale-part-used", "state/fsdp_param_group.cc",
           "sharded_state_ == ShardedState::kShardedPostForward && !dirty_;",
           "sharded_state_ == ShardedState::kShardedPostForward;",
           MESH, "reduction_settings_test.cc",
           "PostForwardTest.AWriteMakesThePartStale",
           "What was kept after a forward is used after its shards were written."),
    Mutant("subgroups-not-shared", "collectives/subgroups.cc",
           "if (auto known = Groups().Find(parent, key)) return known;",
           "",
           COLLECTIVES, "device_mesh_test.cc",
           "DeviceMeshTest.EqualRankSetsShareAGroupForAsLongAsItIsHeld",
           "Every mesh makes process groups of its own."),
]
