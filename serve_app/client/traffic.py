"""Traffic of a model over the management API: policies, experiments, rollouts and shadows."""

from __future__ import annotations

from typing import Any, Literal

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestDescriptor,
    RequestFlow,
    fetch_list,
    fetch_object,
    fetch_text,
    join_path,
    json_body,
)


class TrafficOperations:
    """Operations whose arguments and results are JSON documents."""

    @Operation
    def traffic(self, model: str) -> RequestFlow[JsonObject]:
        """Return a model's traffic policy, and under ``active`` the current shares of its versions."""
        path = join_path("models", model, "traffic")
        return (yield from fetch_object(RequestDescriptor("management", "GET", path)))

    @Operation
    def set_traffic(self, model: str, policy: Any) -> RequestFlow[JsonObject]:
        """Replace the traffic policy and return the document of ``traffic``.

        ``status`` is in it while a part of the server has not applied the policy yet.
        """
        path = join_path("models", model, "traffic")
        return (yield from fetch_object(RequestDescriptor("management", "PUT", path, **json_body(policy))))

    @Operation
    def reset_traffic(self, model: str) -> RequestFlow[JsonObject]:
        """Route every request to the default version again; return the document of ``set_traffic``."""
        path = join_path("models", model, "traffic")
        return (yield from fetch_object(RequestDescriptor("management", "DELETE", path)))

    @Operation
    def start_experiment(self, model: str, document: Any) -> RequestFlow[JsonObject]:
        """Split a model's requests between the arms of an experiment; return it, with its ``id``."""
        path = join_path("models", model, "experiments")
        return (yield from fetch_object(RequestDescriptor("management", "POST", path, **json_body(document))))

    @Operation
    def experiments(self, model: str | None = None) -> RequestFlow[list[JsonObject]]:
        """Return the experiments of a model (None: of all), the newest first, without their figures."""
        path = join_path("models", model, "experiments") if model else "/experiments"
        return (yield from fetch_list(RequestDescriptor("management", "GET", path), "experiments"))

    @Operation
    def experiment(self, id: str) -> RequestFlow[JsonObject]:
        """Return the current results of an experiment."""
        return (yield from fetch_object(RequestDescriptor("management", "GET", join_path("experiments", id))))

    @Operation
    def stop_experiment(self, id: str) -> RequestFlow[JsonObject]:
        """Route the model's requests by its policy again; the measurements are kept."""
        path = join_path("experiments", id)
        return (yield from fetch_object(RequestDescriptor("management", "DELETE", path)))

    @Operation
    def delete_experiment(self, id: str) -> RequestFlow[str]:
        """Delete a stopped experiment with its measurements."""
        request = RequestDescriptor("management", "DELETE", join_path("experiments", id), {"purge": True})
        return (yield from fetch_text(request, "status"))

    @Operation
    def reward(
        self, id: str, *events: JsonObject, port: Literal["management", "inference"] = "management"
    ) -> RequestFlow[dict[str, int]]:
        """Report reward events; return how many were ``counted`` and how many ``repeated`` earlier ones.

        The inference port accepts them too, for applications that reach no other.
        """
        path = join_path("experiments", id, "events")
        return (yield from fetch_object(RequestDescriptor(port, "POST", path, **json_body(list(events)))))

    @Operation
    def start_rollout(self, model: str, document: Any) -> RequestFlow[JsonObject]:
        """Move a model's requests step by step to the version ``to`` of ``document``."""
        path = join_path("models", model, "rollout")
        return (yield from fetch_object(RequestDescriptor("management", "POST", path, **json_body(document))))

    @Operation
    def rollout(self, model: str) -> RequestFlow[JsonObject]:
        """Return the progress, figures, guardrails and decisions of a model's last rollout."""
        path = join_path("models", model, "rollout")
        return (yield from fetch_object(RequestDescriptor("management", "GET", path)))

    @Operation
    def update_rollout(
        self, model: str, action: Literal["pause", "resume", "abort"]
    ) -> RequestFlow[JsonObject]:
        """Pause, resume or abort a rollout."""
        path = join_path("models", model, "rollout", action)
        return (yield from fetch_object(RequestDescriptor("management", "POST", path)))

    @Operation
    def shadow(self, model: str) -> RequestFlow[JsonObject]:
        """Return how a shadow's responses agree with the live ones, and the worst mismatches."""
        path = join_path("models", model, "shadow")
        return (yield from fetch_object(RequestDescriptor("management", "GET", path)))

    @Operation
    def delete_shadow_stats(self, model: str) -> RequestFlow[str]:
        """Delete the figures of a model's shadow, and its stored inputs."""
        path = join_path("models", model, "shadow")
        return (yield from fetch_text(RequestDescriptor("management", "DELETE", path), "status"))
