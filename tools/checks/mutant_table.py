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
GOLDEN = "//tests/parity:golden_traces_test"
SCHEDULE = "//tests/parity:schedule_test"

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

    Mutant("divide-skipped", "state/gradient_reduction.cc",
           "shard.div_(world_size);",
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
           "zero(rank, written, local);\n",
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
           "      WaitForWork();\n",
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
           "  Free(context, /*all=*/true);\n",
           "",
           ROBUSTNESS, "exceptions_test.cc", "ExceptionTest.InANodeBetweenTwoLayers",
           "An exception leaves groups gathered."),
    Mutant("undo-forgets-ties", "composable/fully_shard.cc",
           "{ UntieFromShards(tied); }",
           "{ (void)tied; }",
           ROBUSTNESS, "transactions_test.cc",
           "TransactionTest.ATiedEntryIsTheWholeAgain",
           "A fully_shard that throws leaves tied entries replaced."),

    Mutant("lists-of-the-other-pass", "hooks/unshard.cc",
           "backward ? state->backward_prefetch : state->forward_prefetch;",
           "backward ? state->forward_prefetch : state->backward_prefetch;",
           GOLDEN, "golden_traces_test.cc",
           "GoldenTrace.DiffersByTheRulesAlone/a3_backward_2",
           "Forward gathers ahead what was listed for backward."),
    Mutant("unread-groups-gathered-each-time", "hooks/root_post_backward.cc",
           "  context.backward_order.Commit();\n",
           "",
           GOLDEN, "golden_traces_test.cc",
           "GoldenTrace.DiffersByTheRulesAlone/a6_first_frozen",
           "Backward goes on gathering ahead what it does not read."),
    Mutant("held-groups-stay-over-the-limit", "hooks/pre_forward.cc",
           "    FreeOverLimit(context, needed, order);\n",
           "    (void)order;\n",
           SCHEDULE, "schedule_test.cc",
           "ReshardAfterBackwardTest.ForwardFreesWhatTheBackwardHeld",
           "Groups that a backward held keep their memory through the next forward."),
    Mutant("kept-storage-not-returned", "composable/fsdp_module.cc",
           "state.group()->ReleaseKeptBuffer(context->pool);",
           "",
           SCHEDULE, "schedule_test.cc", "KeepUnshardedStorageTest.DataPointersStay",
           "set_keep_unsharded_storage(false) frees nothing."),
    Mutant("cleared-gradients-kept", "state/gradient_reduction.cc",
           "if (!watch.touched || same) continue;",
           "if (param.numel() >= 0 || watch.touched || same) continue;",
           SCHEDULE, "schedule_test.cc", "ZeroGradTest.DropsPendingGradients",
           "zero_grad() leaves what a backward without sync has kept."),
    Mutant("finalization-not-demanded", "hooks/guard.cc",
           "if (lock.owns_lock()) CheckMayWriteShards(state, Name());",
           "",
           SCHEDULE, "schedule_test.cc",
           "ManualFinalizationTest.ForgottenIsAnErrorAtTheStepAndAtTheNextForward",
           "An optimizer may step with gradients that are not complete."),
    Mutant("not-last-backward-flushes", "hooks/root_post_backward.cc",
           "    if (context.is_last_backward) {\n",
           "    if (true) {\n",
           SCHEDULE, "schedule_test.cc",
           "LastBackwardTest.SticksToTheTreeWhicheverHandleItWasSetOn",
           "A backward that is not the last one reduces what others have kept."),
]
