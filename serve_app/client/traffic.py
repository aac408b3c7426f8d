"""Traffic of a model over the management API: policies, experiments, rollouts and shadows."""

from __future__ import annotations

from typing import Any, Literal

from serve_app.client._operations import (
    JsonObject,
    Operation,
    RequestFlow,
    fetch_list,
    fetch_object,
    fetch_text,
    management_request,
)


class TrafficOperations:
    """Operations whose arguments and results are JSON documents."""

    @Operation
    def traffic(self, model: str) -> RequestFlow[JsonObject]:
        """Return a model's traffic policy, and under ``active`` the current shares of its versions."""
        return (yield from fetch_object(management_request("GET", "models", model, "traffic")))

    @Operation
    def set_traffic(self, model: str, policy: Any) -> RequestFlow[JsonObject]:
        """Replace the traffic policy and return the document of ``traffic``.

        ``status`` is in it while a part of the server has not applied the policy yet.
        """
        request = management_request("PUT", "models", model, "traffic", document=policy)
        return (yield from fetch_object(request))

    @Operation
    def reset_traffic(self, model: str) -> RequestFlow[JsonObject]:
        """Route every request to the default version again; return the document of ``set_traffic``."""
        return (yield from fetch_object(management_request("DELETE", "models", model, "traffic")))

    @Operation
    def start_experiment(self, model: str, document: Any) -> RequestFlow[JsonObject]:
        """Split a model's requests between the arms of an experiment; return it, with its ``id``."""
        request = management_request("POST", "models", model, "experiments", document=document)
        return (yield from fetch_object(request))

    @Operation
    def experiments(self, model: str | None = None) -> RequestFlow[list[JsonObject]]:
        """Return the experiments of a model (None: of all), the newest first, without their figures."""
        path = ("models", model, "experiments") if model else ("experiments",)
        return (yield from fetch_list(management_request("GET", *path), "experiments"))

    @Operation
    def experiment(self, id: str) -> RequestFlow[JsonObject]:
        """Return the current results of an experiment."""
        return (yield from fetch_object(management_request("GET", "experiments", id)))

    @Operation
    def experiment_history(self, id: str) -> RequestFlow[list[JsonObject]]:
        """Return the results of an experiment over time, the oldest first."""
        request = management_request("GET", "experiments", id, "history")
        return (yield from fetch_list(request, "points"))

    @Operation
    def stop_experiment(self, id: str) -> RequestFlow[JsonObject]:
        """Route the model's requests by its policy again; the measurements are kept."""
        return (yield from fetch_object(management_request("DELETE", "experiments", id)))

    @Operation
    def delete_experiment(self, id: str) -> RequestFlow[str]:
        """Delete a stopped experiment with its measurements."""
        return (yield from fetch_text(management_request("DELETE", "experiments", id, query={"purge": True})))

    @Operation
    def reward(
        self, id: str, *events: JsonObject, port: Literal["management", "inference"] = "management"
    ) -> RequestFlow[dict[str, int]]:
        """Report reward events; return how many were ``counted`` and how many ``repeated`` earlier ones.

        The inference port accepts them too, for applications that reach no other.
        """
        request = management_request("POST", "experiments", id, "events", port=port, document=list(events))
        return (yield from fetch_object(request))

    @Operation
    def start_rollout(self, model: str, document: Any) -> RequestFlow[JsonObject]:
        """Move a model's requests step by step to the version ``to`` of ``document``."""
        request = management_request("POST", "models", model, "rollout", document=document)
        return (yield from fetch_object(request))

    @Operation
    def rollout(self, model: str) -> RequestFlow[JsonObject]:
        """Return the progress, figures, guardrails and decisions of a model's last rollout."""
        return (yield from fetch_object(management_request("GET", "models", model, "rollout")))

    @Operation
    def update_rollout(
        self, model: str, action: Literal["pause", "resume", "abort"]
    ) -> RequestFlow[JsonObject]:
        """Pause, resume or abort a rollout."""
        return (yield from fetch_object(management_request("POST", "models", model, "rollout", action)))

    @Operation
    def shadow(self, model: str) -> RequestFlow[JsonObject]:
        """Return how a shadow's responses agree with the live ones, and the worst mismatches."""
        return (yield from fetch_object(management_request("GET", "models", model, "shadow")))

    @Operation
    def shadow_history(self, model: str) -> RequestFlow[list[JsonObject]]:
        """Return the agreement of a shadow over time, as ``points`` by live ``version``."""
        request = management_request("GET", "models", model, "shadow", "history")
        return (yield from fetch_list(request, "against"))

    @Operation
    def delete_shadow_stats(self, model: str) -> RequestFlow[str]:
        """Delete the figures of a model's shadow, and its stored inputs."""
        return (yield from fetch_text(management_request("DELETE", "models", model, "shadow")))
