"""Who gets a model's calls: policies, experiments, rollouts and shadows, over the management API."""

from __future__ import annotations

from typing import Any, Literal

from serve_app.client.ask import Ask, Talk, of_json, operation, path

Said = dict[str, Any]


class Traffic:
    """Documents go in and come out as JSON has them."""

    @operation
    def traffic(self, model: str) -> Talk[Said]:
        """A model's traffic policy, and under ``in_force`` who gets how much of its calls now."""
        return (yield Ask("management", "GET", path("models", model, "traffic"))).json()

    @operation
    def set_traffic(self, model: str, policy: Any) -> Talk[Said]:
        """Set the whole policy; what ``traffic`` says then, or ``status`` where a part of the server is late."""
        return (yield Ask("management", "PUT", path("models", model, "traffic"), **of_json(policy))).json()

    @operation
    def reset_traffic(self, model: str) -> Talk[Said]:
        """Every call gets the default version again; the answer is as of ``set_traffic``."""
        return (yield Ask("management", "DELETE", path("models", model, "traffic"))).json()

    @operation
    def begin_experiment(self, model: str, document: Any) -> Talk[Said]:
        """Deal a model's calls out to the arms of an experiment; the answer has its ``id``."""
        return (yield Ask("management", "POST", path("models", model, "experiments"), **of_json(document))).json()

    @operation
    def experiments(self, model: str | None = None) -> Talk[list[Said]]:
        """Those of a model (None: of all), the newest first, without their figures."""
        where = path("models", model, "experiments") if model else "/experiments"
        return (yield Ask("management", "GET", where)).json()["experiments"]

    @operation
    def experiment(self, id: str) -> Talk[Said]:
        """What is known by now."""
        return (yield Ask("management", "GET", path("experiments", id))).json()

    @operation
    def stop_experiment(self, id: str) -> Talk[Said]:
        """The model's policy deals its calls out again; what was measured stays."""
        return (yield Ask("management", "DELETE", path("experiments", id))).json()

    @operation
    def forget_experiment(self, id: str) -> Talk[str]:
        """Drop one that was stopped, with what was measured."""
        return (yield Ask("management", "DELETE", path("experiments", id), {"forget": True})).json()["status"]

    @operation
    def reward(
        self, id: str, *events: Said, port: Literal["management", "inference"] = "management"
    ) -> Talk[dict[str, int]]:
        """How many of them were ``counted``, and how many ``repeated`` what had been counted before.

        The inference port takes them too, for applications that reach no other.
        """
        return (yield Ask(port, "POST", path("experiments", id, "events"), **of_json(list(events)))).json()

    @operation
    def begin_rollout(self, model: str, document: Any) -> Talk[Said]:
        """Let the version ``to`` of ``document`` take over a model's calls step by step."""
        return (yield Ask("management", "POST", path("models", model, "rollout"), **of_json(document))).json()

    @operation
    def rollout(self, model: str) -> Talk[Said]:
        """How far a model's last rollout is, its figures, its guardrails and its decisions."""
        return (yield Ask("management", "GET", path("models", model, "rollout"))).json()

    @operation
    def steer_rollout(self, model: str, verb: Literal["pause", "resume", "abort"]) -> Talk[Said]:
        """Hold a rollout, let it go on, or end it."""
        return (yield Ask("management", "POST", path("models", model, "rollout", verb))).json()

    @operation
    def shadow(self, model: str) -> Talk[Said]:
        """How the answers of a model's shadow agree with the live ones, and the worst disagreements."""
        return (yield Ask("management", "GET", path("models", model, "shadow"))).json()

    @operation
    def forget_shadow(self, model: str) -> Talk[str]:
        """Drop these figures, and the inputs that are kept."""
        return (yield Ask("management", "DELETE", path("models", model, "shadow"))).json()["status"]
