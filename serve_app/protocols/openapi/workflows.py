"""Workflows: graphs of models and functions under one name."""

from __future__ import annotations

from serve_app.protocols.openapi.builders import (
    DocumentPart,
    Json,
    array,
    boolean,
    integer,
    mapping,
    number,
    object_schema,
    operation,
    path_parameter,
    query_parameter,
    request_body,
    response,
    schema_ref,
    string,
)
from serve_app.protocols.openapi.torchserve import ERRORS, SCHEMAS, STATUS

_SOURCES: Json = {"anyOf": [string(), mapping(string())], "description": "A source, or sources by name."}
_SCHEMAS = {
    **SCHEMAS,
    "Step": object_schema(
        (),
        "A step: a model, or a function of the workflow's file.",
        model=string("NAME or NAME:VERSION"),
        function=string(),
        inputs=_SOURCES,
        each={**_SOURCES, "description": "Sources that are lists: the step runs for each item."},
        parallel=integer("The number of concurrent items.", minimum=1, maximum=1000),
        retries=integer("Retries after the first attempt.", minimum=0, maximum=20),
        timeout_s=number("The timeout of an attempt in seconds.", exclusiveMinimum=0),
    ),
    "NewWorkflow": object_schema(
        (),
        "A workflow, or the source of its archive with the fields of the query.",
        url=string(),
        workflow_name=string(),
        name=string("The workflow's name in requests."),
        version=string("Default: 1.0."),
        steps=mapping(schema_ref("Step"), "By name."),
        output={"anyOf": [string(), array(string())], "description": "The steps whose outputs are returned."},
        timeout_s=number("The timeout of a request in seconds.", exclusiveMinimum=0),
    ),
    "Workflow": object_schema(
        ("workflowName", "workflowUrl", "workflowVersion", "defaultVersion", "steps", "output"),
        workflowName=string(),
        workflowUrl=string("The URL of its archive; empty if it was registered as a document."),
        minWorkers=integer(),
        maxWorkers=integer(),
        batchSize=integer(),
        maxBatchDelay=integer(),
        workflowDag=string("The successors of each step."),
        workflowVersion=string(),
        defaultVersion=boolean("Whether requests without a version run this one."),
        steps=mapping(schema_ref("Step")),
        output=array(string()),
        ongoing=integer("Requests in progress.", minimum=0),
        functions=object_schema((), phase=string(), workers=integer()),
        timeout_s=number(),
    ),
    "Workflows": object_schema(
        ("workflows",),
        nextPageToken=string(),
        workflows=array(
            object_schema(("workflowName", "workflowUrl"), workflowName=string(), workflowUrl=string())
        ),
    ),
}
_NAME = path_parameter("workflow_name", "The workflow.")
_CHANGED = {
    "200": response("Done.", STATUS),
    "202": response("Stored; some replicas have not applied it yet.", STATUS),
}

WORKFLOWS = DocumentPart(
    "Workflows",
    "Registration and description. A workflow is called by name, like a model.",
    {
        "/workflows": {
            "get": operation(
                "workflows",
                "List workflows by name.",
                {
                    "200": response("A page of workflows.", schema_ref("Workflows")),
                    **ERRORS.responses_for(400, 500),
                },
                query_parameter(
                    "limit", "The maximum number on a page, 0 to 100; other values stand for 100."
                ),
                query_parameter("next_page_token", "The nextPageToken of the previous page."),
            ),
            "post": operation(
                "register_workflow",
                "Register a workflow, from a .war or from a document.",
                {
                    **_CHANGED,
                    **ERRORS.responses_for(400, 404, 405, 409, 413, 500, 507),
                },
                query_parameter("url", "A name in the workflow store, or a URL."),
                query_parameter("workflow_name", "The name; default: the archive's."),
                query_parameter("response_timeout", "The timeout of its models in seconds.", integer()),
                query_parameter("startup_timeout", "The timeout of their start in seconds.", integer()),
                query_parameter(
                    "s3_sse_kms", "true: an https URL of S3's is signed.", string(enum=["true", "false"])
                ),
                body=request_body(
                    schema_ref("NewWorkflow"), "application/json", "application/yaml", required=False
                ),
            ),
        },
        "/workflows/{workflow_name}": {
            "get": operation(
                "workflow",
                "Describe every version of a workflow.",
                {
                    "200": response(
                        "The versions, the default one first.", array(schema_ref("Workflow"), minItems=1)
                    ),
                    **ERRORS.responses_for(400, 404, 500),
                },
                _NAME,
            ),
            "delete": operation(
                "unregister_workflow",
                "Unregister a workflow and the models of its archive.",
                {**_CHANGED, **ERRORS.responses_for(400, 404, 405, 409, 500)},
                _NAME,
            ),
        },
        "/workflows/{workflow_name}/{workflow_version}": {
            "delete": operation(
                "unregister_workflow_version",
                "Unregister one version of a workflow.",
                {**_CHANGED, **ERRORS.responses_for(400, 403, 404, 405, 409, 500)},
                _NAME,
                path_parameter("workflow_version", "The version."),
            )
        },
    },
    _SCHEMAS,
)
