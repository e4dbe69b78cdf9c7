"""Mutations of the package: each breaks one law or rule, and names the tests that must notice it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: Law (docs/architecture.md) or area that is broken.
        name: What is broken, in a few words.
        file: File of the package.
        fragment: Source text that occurs there exactly once.
        replacement: Text that takes its place.
        tests: Arguments of pytest that select the tests; at least one of them must fail.
        hangs: A test that does not end counts as one that fails.
    """

    rule: str
    name: str
    file: str
    fragment: str
    replacement: str
    tests: tuple[str, ...]
    hangs: bool = False


_ENGINE = "tests/pipeline/test_engine.py"
_SHARD = "tests/server/test_protocol_shard.py"
_STORIES = "tests/server/test_protocol_stories.py"

EARLY_PUBLISH = """engine, version = self.pipeline, self._last
        if engine is None:
            return nullcontext()

        class Early(AroundStep):
            def asked(self):
                engine.publish(version)
                engine.publish = lambda version: vars(engine).pop("publish")
                return nullcontext()

            def stepping(self):
                return nullcontext()

        return around_step(optimizer, [*self._around, Early()])
"""

MUTATIONS = (
    # Versions.
    Mutation(
        "L1",
        "a forward runs on the oldest version that is held",
        "pipeline/segment_runner.py",
        "self._bind(task.weights)",
        "self._bind(min(self._stash._held))",
        (_ENGINE, "-k", "gradients_are_those_of_the_version"),
    ),
    Mutation(
        "L1",
        "a backward runs on another version than its forward",
        "pipeline/segment_runner.py",
        "self._bind(saved.weights)",
        "self._bind(max(self._stash._held))",
        ("tests/exact/test_recompute.py", "-k", "sequentials"),
    ),
    Mutation(
        "L1",
        "versions go on counting where the pipeline starts empty",
        "rules/versions.py",
        "return max(self.empty_at, self.policy",
        "return max(0, self.policy",
        ("tests/rules/test_versions.py",),
    ),
    Mutation(
        "L1",
        "a version is published before callbacks had their say",
        "run/fit.py",
        "return around_step(optimizer, self._around) if self._around else nullcontext()",
        EARLY_PUBLISH,
        ("tests/exact/test_outsiders.py", "-k", "weights_that_a_callback_edits"),
    ),
    Mutation(
        "L1",
        "weights that were changed through .data keep the old copy",
        "pipeline/weight_stash.py",
        "return all_equal(",
        "return True or all_equal(",
        ("tests/pipeline/test_weight_stash.py",),
    ),
    Mutation(
        "L1",
        "gradients of a loss scale that has changed since are not rescaled",
        "run/extensions/minibatch_state.py",
        "return self._present() / self._of.pop(minibatch)",
        "return 1.0",
        ("tests/exact/test_options.py", "-k", "precision", "tests/parity/test_precision.py"),
    ),
    Mutation(
        "L1",
        "a minibatch of the next optimizer step starts before that of sync is over",
        "rules/versions.py",
        "return sum(self.version(minibatch) <= published for minibatch in numbers)",
        "return len(numbers)",
        ("tests/rules/test_versions.py",),
    ),
    Mutation(
        "L1",
        "a prediction is by one step, however many are missing",
        "pipeline/stage_messages.py",
        "steps * self.scale",
        "self.scale",
        ("tests/exact/test_weight_policies.py", "-k", "against_the_oracle and spectrain"),
    ),
    Mutation(
        "L1",
        "a step that was skipped is expected once more",
        "run/prediction.py",
        "if self._changes is before:",
        "if False:",
        ("tests/exact/test_weight_policies.py", "-k", "quadratic"),
    ),
    # The schedule.
    Mutation(
        "L2",
        "a stage runs what came last first",
        "pipeline/threads.py",
        "self._inbox: queue.SimpleQueue[T | None] = queue.SimpleQueue()",
        "self._inbox: queue.Queue[T | None] = queue.LifoQueue()",
        ("tests/pipeline/test_recorded_order.py",),
    ),
    Mutation(
        "L2",
        "the last stage goes on with others between forward and backward",
        "pipeline/stage.py",
        "return self._next_of(number) if isinstance(message, Forward) and message.last else None",
        "return None",
        ("tests/pipeline/test_recorded_order.py",),
    ),
    Mutation(
        "L2",
        "a minibatch starts from buffers that the one before it has not left yet",
        "rules/schedule.py",
        "if self._open is not None and minibatch > self._open:",
        "if self._open is not None and minibatch > self._open + 1000:",
        ("tests/rules/test_call_order.py", "tests/pipeline/test_repeated_calls.py"),
    ),
    # Waves.
    Mutation(
        "L3",
        "a virtual worker runs D + 1 waves ahead",
        "rules/waves.py",
        "c_global >= c_local - distance",
        "c_global >= c_local - distance - 1",
        ("tests/server/test_decisions.py", "-k", "fast"),
    ),
    Mutation(
        "L3",
        "a wave's last version is published before it is merged",
        "run/driver.py",
        "        self._step_over(version)\n        tell(",
        """        if not self.restarts:
            pool = self.pipeline
            pool.publish(version)
            pool.publish = lambda version: vars(pool).pop("publish")
        self._step_over(version)
        tell(""",
        ("tests/wsp/test_exact.py", "-k", "three", "-m", "slow"),
    ),
    Mutation(
        "L3",
        "an update holds what was pushed before",
        "workers/weight_copies.py",
        "foreach_copy_([last for last, _ in taken], [parameter.detach() for _, parameter in taken])",
        "pass",
        ("tests/workers/test_synchroniser.py", "tests/wsp/test_checkpoints.py"),
    ),
    # Servers.
    Mutation(
        "L4",
        "at D = 0 updates are added in order of arrival",
        "server/protocol/commit_log.py",
        "return sorted(update for update in self._queue if update.clock == wave)",
        "return list(update for update in self._queue if update.clock == wave)",
        ("tests/server/test_client.py", "-k", "oracle", "tests/server/test_protocol.py"),
    ),
    Mutation(
        "L4",
        "at D = 0 a wave is added before all of it has come",
        "rules/waves.py",
        "c_global > clock",
        "c_global >= clock",
        ("tests/rules/test_waves.py",),
    ),
    Mutation(
        "L4",
        "an update with a NaN is accepted",
        "server/protocol/shard.py",
        "if not finite(view):",
        "if not finite(view) and not view.numel():",
        (_SHARD, "-k", "not_finite"),
    ),
    Mutation(
        "L4",
        "a mean is divided by how many there are at the commit",
        "server/protocol/commit_log.py",
        "self._sizes[update.clock] if self._mean else 1",
        "len(self.clock) if self._mean else 1",
        (_STORIES, "-k", "size_of_a_wave"),
    ),
    Mutation(
        "L4",
        "a mean is not divided",
        "server/protocol/shard.py",
        "if divisor != 1:",
        "if divisor < 1:",
        (_SHARD, "-k", "mean"),
    ),
    # Faults.
    Mutation(
        "L5",
        "commits that were added already are added again",
        "server/protocol/shard.py",
        "self._apply(message.tail[self.applied - message.start :])",
        "self._apply(message.tail)",
        (_SHARD, "-k", "once"),
    ),
    Mutation(
        "L5",
        "an update that is announced again, as the answer was lost, is refused",
        "server/protocol/commit_log.py",
        "if clock < self.clock[vw]:",
        "if clock < -1:",
        ("tests/server/test_commit_log.py",),
    ),
    Mutation(
        "L5",
        "servers are rebuilt from the oldest pull",
        "server/protocol/recovery.py",
        "return max(pulls, key=",
        "return min(pulls, key=",
        ("tests/server/test_protocol_stories.py", "-k", "newest_pull"),
    ),
    Mutation(
        "L5",
        "updates that are pushed again are added in order of arrival",
        "server/protocol/commit_log.py",
        "self._queue[:0] = sorted(self._repushed)",
        "self._queue[:0] = self._repushed",
        ("tests/server/test_commit_log.py",),
    ),
    Mutation(
        "L5",
        "an older incarnation is not fenced",
        "server/protocol/roster.py",
        "if incarnation < known:",
        "if incarnation < known - 1000:",
        (_STORIES, "-k", "incarnation"),
    ),
    Mutation(
        "L5",
        "a lease never expires",
        "server/protocol/roster.py",
        "if now - seen > self.seconds]",
        "if now - seen > 1e9 * self.seconds]",
        (_STORIES,),
    ),
    # Cuts.
    Mutation(
        "L6",
        "an epoch does not begin with an empty pipeline",
        "run/driver.py",
        "self.restarts = True",
        "self.restarts = False",
        ("tests/run/test_lifecycle.py",),
    ),
    Mutation(
        "L6",
        "the pipeline looks past max_steps",
        "run/fit.py",
        "return min(in_flight, (max_steps - self._trainer.global_step) * accumulate - begun)",
        "return in_flight",
        ("tests/exact/test_interruptions.py", "-k", "past_max_steps"),
    ),
    Mutation(
        "L6",
        "at an epoch's end each keeps its own buffers",
        "run/extensions/waves_and_cuts.py",
        """        self._running = False
        self.synchroniser.take_buffers()""",
        "        self._running = False",
        ("tests/wsp/test_checkpoints.py", "tests/workers/test_synchroniser.py"),
    ),
    Mutation(
        "L6",
        "an evaluation within an epoch leaves the buffers of virtual worker 0 behind",
        "run/extensions/waves_and_cuts.py",
        "            put_back()",
        "            pass",
        ("tests/run/test_cuts.py", "-k", "buffers"),
    ),
    # Random numbers.
    Mutation(
        "L7",
        "a generator's seed leaves the minibatch out",
        "pipeline/random/generators.py",
        'f"{self.run_seed}|{self.virtual_worker}|{minibatch}|{ordinal}|{path}"',
        'f"{self.run_seed}|{self.virtual_worker}|{0}|{ordinal}|{path}"',
        ("tests/pipeline/test_generators.py",),
    ),
    Mutation(
        "L7",
        "a generator's seed leaves the virtual worker out",
        "pipeline/random/generators.py",
        'f"{self.run_seed}|{self.virtual_worker}|{minibatch}|{ordinal}|{path}"',
        'f"{self.run_seed}|{0}|{minibatch}|{ordinal}|{path}"',
        ("tests/pipeline/test_generators.py",),
    ),
    Mutation(
        "L7",
        "a second call of a module draws what the first one drew",
        "pipeline/random/generators.py",
        'minibatch = f"{minibatch}.{call}"',
        'minibatch = f"{minibatch}"',
        ("tests/pipeline/test_generators.py", "tests/exact/test_calls.py", "-k", "calls"),
    ),
    Mutation(
        "L7",
        "a forward that is computed again draws another mask",
        "pipeline/segment_runner.py",
        "return tensors_of(self._compute(task, saved.inputs, saved.kind))",
        "return tensors_of(self._compute(task._replace(minibatch=-1), saved.inputs, saved.kind))",
        ("tests/exact/test_recompute.py", "-k", "sequentials"),
    ),
    # User code.
    Mutation(
        "L8",
        "the lock over user code is granted while somebody holds it",
        "pipeline/user/lock.py",
        """            if not self.held:
                self._hand_over()""",
        """            self._hand_over()""",
        ("tests/pipeline/test_lock.py",),
    ),
    Mutation(
        "L8",
        "a minibatch keeps the lock while it waits for the pipeline",
        "pipeline/user/minibatch.py",
        """            self.in_user_code = False
            self._engine.lock.release()""",
        """            self.in_user_code = False
            if for_good:
                self._engine.lock.release()""",
        (_ENGINE, "-k", "user_code_is_never_concurrent or pieces_with_user_code"),
        hangs=True,
    ),
    Mutation(
        "L8",
        "Lightning's thread keeps the lock while it waits",
        "run/driver.py",
        "return nullcontext() if self.pipeline is None or current() is not None else self.pipeline.main.unlocked()",
        "return nullcontext()",
        ("tests/exact/test_data.py", "-k", "next_batch"),
    ),
    Mutation(
        "L8",
        "new minibatches go before those that stages wait for",
        "pipeline/user/lock.py",
        """    RESUME = 0
    START = 1""",
        """    RESUME = 1
    START = 0""",
        ("tests/pipeline/test_lock.py",),
    ),
    Mutation(
        "L8",
        "the optimizer's hooks run beside other user code",
        "run/around_step.py",
        "    run_first(optimizer, after)  # other post hooks are user code",
        "    after",
        ("tests/run/test_user_sections.py", "-k", "optimizer"),
    ),
    # Observers.
    Mutation(
        "L9",
        "buffers are shown that a later forward has left",
        "pipeline/engine.py",
        "stage.live.show(stage.state(minibatch.number))",
        "stage.live.show(stage.state(minibatch.number + 1))",
        ("tests/exact/test_grid.py",),
    ),
    Mutation(
        "L9",
        "weights that hooks compute stay those of the first minibatch",
        "pipeline/engine.py",
        "                    compute(module, weight)",
        "                    pass",
        ("tests/exact/test_live_changes.py", "-k", "pruning"),
    ),
    Mutation(
        "L9",
        "what a step has logged is replayed one step late",
        "run/extensions/replay.py",
        "self._make_all(self._records[minibatch.number])",
        "late, self.late = getattr(self, 'late', deque()), self._records[minibatch.number]; self._make_all(late)",
        ("tests/exact/test_outsiders.py", "-k", "logged or metrics"),
    ),
    Mutation(
        "L9",
        "a discarded minibatch leaves its logs",
        "run/extensions/replay.py",
        "            self._records.clear()",
        "            self._make_all(self._records.popitem()[1])",
        (
            "tests/exact/test_interruptions.py",
            "tests/parity/test_pairs.py",
            "-k",
            "stop or skipped or where_a_run_ends",
        ),
    ),
    Mutation(
        "L9",
        "a checkpoint has the loader's state at the batch fetched last",
        "run/look_ahead.py",
        "return redirect.original() if self._states is None else self._states",
        "return redirect.original()",
        ("tests/exact/test_resume.py", "-k", "resumable"),
    ),
    Mutation(
        "L9",
        "an attribute that a step sets is seen at once",
        "run/extensions/module_attributes.py",
        "next(numbers)), self.leave)",
        "next(numbers)), lambda: None)",
        ("tests/run/test_module_attributes.py", "tests/run/test_user_sections.py"),
    ),
    Mutation(
        "L9",
        "a step may change what batches in flight share",
        "run/extensions/shared_values.py",
        "if changed is not None and self._failure is None:",
        "if False:",
        ("tests/run/test_shared_values.py",),
    ),
    Mutation(
        "L9",
        "tensors that share memory are copied one by one",
        "run/extensions/module_attributes.py",
        "if id(value) in self._aliases:",
        "if False:",
        ("tests/run/test_shared_values.py", "-k", "view or names"),
    ),
    Mutation(
        "L9",
        "a request to stop takes effect before its step",
        "run/extensions/minibatch_state.py",
        "own, stop, trainer.should_stop = there, trainer.should_stop, stop",
        "own, stop = there, trainer.should_stop",
        ("tests/run/test_user_sections.py", "-k", "stop"),
    ),
    # Sums.
    Mutation(
        "L10",
        "custom autograd functions are given what user code gives them",
        "torch_private/modes.py",
        "apply = CustomFunction(mode, apply if isinstance(apply, CustomFunction) else _Heard(function, apply))",
        "pass",
        ("tests/exact/test_sums.py", "-k", "users_own"),
    ),
    Mutation(
        "L10",
        "a tensor's uses are added the earliest first",
        "pipeline/values.py",
        "return functools.reduce(operator.add, gradient) if",
        "return functools.reduce(operator.add, gradient[::-1]) if",
        ("tests/exact/test_sums.py",),
    ),
    Mutation(
        "L10",
        "a tied weight's uses on other stages are lost",
        "pipeline/segment_runner.py",
        "        if sums:",
        "        if not sums and sums:",
        ("tests/exact/test_options.py", "-k", "tied"),
    ),
    Mutation(
        "gradients",
        "two parameters share one gradient's memory",
        "run/around_step.py",
        "if memory in taken or gradient.stride() != parameter.stride():",
        "if gradient.stride() != parameter.stride():",
        ("tests/run/test_gradients.py",),
    ),
    Mutation(
        "gradients",
        "a parameter that a callback has frozen gets its gradient",
        "run/around_step.py",
        "if not parameter.requires_grad:  # a callback froze it meanwhile",
        "if False:",
        ("tests/run/test_gradients.py",),
    ),
    # What else there is.
    Mutation(
        "buffers",
        "a forward starts from its own buffers of Nm minibatches ago",
        "pipeline/buffers.py",
        "own, previous = self.left(minibatch), self.left(minibatch - 1)",
        "own, previous = self.left(minibatch), self.left(minibatch)",
        ("tests/pipeline/test_buffers.py",),
    ),
    Mutation(
        "recomputation",
        "buffers count a forward twice that is computed again",
        "pipeline/segment_runner.py",
        "bind(self._places, saved.buffers)",
        "self.buffers.bind(task.minibatch, self._places)",
        ("tests/exact/test_recompute.py", "-k", "sequentials"),
    ),
    Mutation(
        "capture",
        "a value that a graph has frozen changes unnoticed",
        "capture/effects.py",
        "        return told(found)",
        "        return None",
        ("tests/exact/test_frozen_values.py", "-k", "named"),
    ),
    Mutation(
        "streams",
        "a stage does not wait for its version's copy",
        "pipeline/stage.py",
        "        self.stream.join(self.stash.buffer(task.weights).published)\n",
        "",
        ("tests/pipeline/test_streams.py",),
    ),
    Mutation(
        "look-ahead",
        "a batch that cannot be read fails an earlier step",
        "run/look_ahead.py",
        "                self._failure = error  # it surfaces at its own batch\n                break",
        "                raise",
        ("tests/run/test_look_ahead.py", "-k", "sample"),
    ),
    Mutation(
        "threads",
        "torch's number of threads stays changed",
        "run/fit.py",
        "self._undo.callback(torch.set_num_threads, self._plain_threads)",
        "pass",
        ("tests/golden/test_golden.py", "-k", "detached"),
    ),
    Mutation(
        "deadlocks",
        "virtual workers that wait for each other go unnoticed",
        "server/protocol/coordinator.py",
        "if why is not None:",
        "if why is not None and not why:",
        (_STORIES, "-k", "circle"),
    ),
    Mutation(
        "security",
        "a wrong token is admitted",
        "server/transport/security.py",
        "return hmac.compare_digest(given, self.token.encode())",
        "return bool(given)",
        ("tests/server/test_security.py",),
    ),
    Mutation(
        "security",
        "an address that others reach needs no certificates",
        "server/transport/security.py",
        "if not self.encrypted and not self.insecure and not is_loopback(host):",
        "if not host:",
        ("tests/server/test_security.py",),
    ),
    Mutation(
        "messages",
        "a message of any size is read",
        "server/transport/codec.py",
        "if len(data) > self._limit:",
        "if len(data) > 1000 * self._limit:",
        ("tests/server/test_messages.py",),
    ),
    Mutation(
        "messages",
        "a shard takes weights of any size",
        "server/protocol/shard.py",
        '        if size != wanted:\n            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes of weights',
        '        if size < 0:\n            raise RemoteFault(Refusal.MALFORMED, f"{size} bytes of weights',
        (_SHARD, "-k", "refused"),
    ),
    Mutation(
        "planning",
        "the memory of a stage leaves versions out",
        "planning/model/stage_memory.py",
        "versions=copies * trained + frozen,",
        "versions=0,",
        ("tests/planning/test_choice.py", "-k", "TestMemory"),
    ),
    Mutation(
        "planning",
        "the memory of a spread run leaves the optimizer's step out",
        "planning/model/stage_memory.py",
        "workspace=max(int(self._largest[first, end]), int(self._step * trained) - kept - passing),",
        "workspace=int(self._largest[first, end]),",
        ("tests/planning/test_spread_plan.py", "-k", "TestMemory"),
    ),
    Mutation(
        "planning",
        "the bottleneck leaves transfers out",
        "planning/model/simulate.py",
        "return self.receive + self.forward + self.loss + self.receive_gradient + self.backward",
        "return self.forward + self.loss + self.backward",
        ("tests/planning/test_simulate.py",),
    ),
    Mutation(
        "planning",
        "virtual workers do not take turns on a device that they share",
        "planning/model/shared_links.py",
        "if self._busy:",
        "if False:",
        ("tests/planning/test_cluster_simulation.py",),
    ),
    Mutation(
        "planning",
        "a device has room for each of the last stages of several virtual workers, but not for all",
        "planning/allocation/allocator.py",
        "if all(choice.fits for choice in asked) and not overfull(asked) else None",
        "if all(choice.fits for choice in asked) else None",
        ("tests/planning/test_placed.py",),
    ),
    Mutation(
        "planning",
        "batches cross no network",
        "planning/allocation/allocator.py",
        "if given and leader != first:",
        "if False:",
        ("tests/planning/test_placed.py",),
    ),
    Mutation(
        "planning",
        "a profile of one device is taken for another's",
        "planning/plan/profile_file.py",
        "text = json.dumps(asdict(self), sort_keys=True",
        'text = json.dumps({**asdict(self), "device": ""}, sort_keys=True',
        ("tests/planning/test_profile_cache.py",),
    ),
    Mutation(
        "L10",
        "gradients from several devices are added in order of arrival",
        "pipeline/operands.py",
        "set_multithreading_enabled(False)",
        "set_multithreading_enabled(True)",
        ("tests/accelerator/test_larger_than_a_device.py",),
    ),
    Mutation(
        "checkpoints",
        "a save that is killed leaves half a checkpoint",
        "strategy/checkpoints.py",
        "write(checkpoint, beside)",
        "write(checkpoint, place)",
        ("tests/parity/test_interrupted_save.py",),
    ),
    Mutation(
        "staleness",
        "no learning rate is too large for stale gradients",
        "rules/staleness.py",
        "return most if group.lr > most * (1 + 1e-6) else None",
        "return None",
        ("tests/rules/test_staleness.py",),
    ),
    # Layers.
    Mutation(
        "L8",
        "stages run the code of a Sequential's children, though it has a graph",
        "capture/pieces.py",
        "return self.wants_graph or has_users_layers(self.module)",
        "return self.wants_graph",
        ("tests/exact/test_inside_blocks.py", "-k", "no_code_of_the_users"),
    ),
    Mutation(
        "L7",
        "a module that draws in several layers has its random numbers named by a graph",
        "capture/grouping.py",
        "return any(map(may_draw, shared))",
        "return False",
        ("tests/capture/test_sequentials.py", "-k", "two_layers_that_may_draw"),
    ),
    Mutation(
        "L1",
        "a host does not move weights on by the steps that a minibatch misses",
        "hosts/stage_host.py",
        "stage.publish(version.replaced(self._held.found))",
        "stage.publish(version.replaced(self._held.found)._replace(moves=()))",
        ("tests/hosts/test_exact_hosts.py", "-k", "test_weight_policies and xpipe"),
    ),
    Mutation(
        "L9",
        "buffers that a host has left are those of the minibatch after",
        "hosts/remote_stage.py",
        'self._host_memory.ask("look", minibatch)',
        'self._host_memory.ask("look", minibatch + 1)',
        ("tests/hosts/test_exact_hosts.py", "-k", "test_models and resnet-2-2"),
    ),
    Mutation(
        "L9",
        "what an operator at a host has changed of a tensor that is here stays there",
        "hosts/remote_tensor.py",
        "            tensor.copy_(lent[id(tensor)].bring())\n",
        "            pass\n",
        ("tests/hosts/test_remote_tensors.py", "-k", "loss_scaler or operators"),
    ),
    Mutation(
        "L9",
        "a random number is drawn where its tensor is",
        "hosts/remote_tensor.py",
        "torch.Tag.nondeterministic_seeded in func.tags",
        "False",
        ("tests/hosts/test_remote_tensors.py", "-k", "random_numbers"),
    ),
    Mutation(
        "L9",
        "a host sends what its device has not computed yet",
        "hosts/host_device.py",
        "self._stream.join(event, result.value.tensors)",
        "pass",
        ("tests/hosts/test_accelerators.py", "-k", "another_machine and plain"),
    ),
    Mutation(
        "L1",
        "weights are stepped before their gradients are computed on a host's device",
        "hosts/stage_host.py",
        "self._streams.user.join(event, found.values())",
        "pass",
        ("tests/hosts/test_accelerators.py", "-k", "another_machine and plain"),
    ),
    Mutation(
        "L1",
        "an order overtakes the operators that wait",
        "hosts/host_memory.py",
        "            self.flush()\n            self._send(orders.Do(method, arguments))",
        "            self._send(orders.Do(method, arguments))",
        ("tests/hosts/test_exact_hosts.py", "-k", "test_models and views-3-3"),
    ),
    Mutation(
        "layers",
        "what a block computes before its first part stays with the block before it",
        "capture/grouping.py",
        "return block != last.within or (call not in (None, last.call) and last.call != block)",
        "return call not in (None, last.call) and last.call != last.within",
        ("tests/capture/test_grouping.py", "-k", "split_between_its_children"),
    ),
    Mutation(
        "layers",
        "a graph does not see what is changed under torch.no_grad()",
        "capture/grouping.py",
        "return list(_written_in_regions(node)), list(node.all_input_nodes)",
        "return [], list(node.all_input_nodes)",
        ("tests/capture/test_grouping.py", "-k", "region_of_its_own"),
    ),
    Mutation(
        "layers",
        "a comparison leaves in a module the buffers that it assigns",
        "capture/effects.py",
        "        _refill(self._names)\n",
        "",
        ("tests/exact/test_functions_of_torch.py", "-k", "ViewOfInput"),
    ),
    Mutation(
        "layers",
        "stages write into data that a buffer is a view of",
        "capture/observation.py",
        "buffer.data = buffer.detach().clone()",
        "pass",
        ("tests/exact/test_functions_of_torch.py", "-k", "data_stay"),
    ),
    Mutation(
        "layers",
        "a buffer that torch.export does not write is lost in a graph",
        "capture/export.py",
        "            assigned.add(path)",
        "            pass",
        ("tests/exact/test_functions_of_torch.py", "-k", "AssignedBeneath"),
    ),
    Mutation(
        "layers",
        "what a forward changes outside of its module is no side effect",
        "capture/export.py",
        "if paths := [path for path in before_run.changed() if path not in patched]:",
        "if paths := []:",
        ("tests/exact/test_side_effects.py", "-k", "count_in_place or fill_a_global"),
    ),
    Mutation(
        "layers",
        "tracing leaves what it has changed",
        "capture/effects.py",
        "stack.callback(before_run.undo)",
        "pass",
        ("tests/exact/test_side_effects.py", "-k", "side_effects_are"),
    ),
    Mutation(
        "layers",
        "gradients of a graph are not compared",
        "capture/parity_check.py",
        "if not alike(one, other, tolerance_of(call.autocast, one), largest):",
        "if False:",
        ("tests/exact/test_side_effects.py", "-k", "other_gradients"),
    ),
    Mutation(
        "L7",
        "a seed of the user's does not govern what is drawn after it",
        "pipeline/random/generators.py",
        "return self.in_user_code and has_own_seed()",
        "return False",
        ("tests/exact/test_side_effects.py", "-k", "seed or shuffle"),
    ),
    Mutation(
        "layers",
        "a graph leaves out the checkpoints in a Sequential",
        "capture/watch.py",
        "if frozen.checkpoints:",
        "if False:",
        ("tests/capture/test_sequentials.py", "-k", "a_line_that_says_why"),
    ),
    # Shares of unequal virtual workers.
    Mutation(
        "shares",
        "the last wave is dealt without regard to the lengths of waves",
        "rules/waves.py",
        "itertools.islice(_one_by_one([least] * len(lengths), lengths), more, None)",
        "itertools.islice(_one_by_one([least] * len(lengths), [1] * len(lengths)), more, None)",
        ("tests/rules/test_shares.py",),
    ),
    Mutation(
        "shares",
        "a wave ends within an epoch where another virtual worker is at its end",
        "rules/waves.py",
        "    return min(max(0, last - first - 1) // length for",
        "    return max(max(0, last - first - 1) // length for",
        ("tests/run/test_intervals.py",),
    ),
    Mutation(
        "shares",
        "intervals are each virtual worker's own",
        "run/together.py",
        "return 0 if self.is_due(int(self)) else 1",
        "return count % int(self)",
        ("tests/run/test_intervals.py",),
    ),
    Mutation(
        "shares",
        "the last step of max_steps, within a wave, leaves a validation to the others",
        "run/together.py",
        "if trainer.max_steps >= 0:",
        "if False:",
        ("tests/run/test_intervals.py",),
    ),
    Mutation(
        "shares",
        "a call within a wave waits for virtual workers that are elsewhere",
        "run/extensions/waves_and_cuts.py",
        "        return self._intervals.ends_wave()\n",
        "        return True\n",
        ("tests/run/test_intervals.py",),
    ),
    Mutation(
        "shares",
        "waits for others make a virtual worker slow",
        "run/extensions/telemetry.py",
        "if all(minibatch.ended for minibatch in flying):",
        "if False:",
        ("tests/run/test_pace.py",),
    ),
    Mutation(
        "shares",
        "noise changes shares",
        "rules/waves.py",
        "GAIN = 1.1",
        "GAIN = 1.0",
        ("tests/rules/test_shares.py",),
    ),
    Mutation(
        "L5",
        "an update is added when only parts of it are there",
        "server/protocol/shard.py",
        "        if len(found) < len(layout.parameters):\n",
        "        found = {n: found.get(n, torch.zeros(s, dtype=d)) for n, (_, d, s) in enumerate(layout.places)}\n"
        "        if False:\n",
        (_SHARD,),
    ),
    Mutation(
        "L5",
        "an update counts as pushed when the answer to one part is missing",
        "server/process/held_weights.py",
        "return min(answers, key=precedence)",
        "return max(answers, key=precedence)",
        ("tests/server/test_protocol_stories.py", "-k", "all_parts_of_an_update"),
    ),
)
