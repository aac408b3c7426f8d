"""Workflows: models and functions that answer together under one name."""

from __future__ import annotations

from serve_app.doors.openapi.torchserve import DIALECT, SCHEMAS, STATUS
from serve_app.doors.openapi.words import (
    Json,
    Part,
    answer,
    array,
    body,
    document,
    flag,
    in_path,
    in_query,
    integer,
    mapping,
    number,
    operation,
    schema,
    text,
)

_SOURCES: Json = {"anyOf": [text(), mapping(text())], "description": "A source, or sources by name."}
_SCHEMAS = {
    **SCHEMAS,
    "Step": document(
        (),
        "What a step asks: a model, or a function of the workflow's own file.",
        model=text("NAME or NAME:VERSION"),
        function=text(),
        inputs=_SOURCES,
        each={**_SOURCES, "description": "Sources that are lists: the step is asked for each item."},
        parallel=integer("How many items are asked for at once.", minimum=1, maximum=1000),
        retries=integer("After the first attempt.", minimum=0, maximum=20),
        timeout_s=number("Seconds for one attempt.", exclusiveMinimum=0),
    ),
    "NewWorkflow": document(
        (),
        "A workflow; or where its archive is, in the words of the query.",
        url=text(),
        workflow_name=text(),
        name=text("How calls name it."),
        version=text("1.0 unless said."),
        steps=mapping(schema("Step"), "By name."),
        output={"anyOf": [text(), array(text())], "description": "The steps that answer."},
        timeout_s=number("Seconds for a call.", exclusiveMinimum=0),
    ),
    "Workflow": document(
        ("workflowName", "workflowUrl", "workflowVersion", "defaultVersion", "steps", "output"),
        workflowName=text(),
        workflowUrl=text("Of its archive; empty where a document said all."),
        minWorkers=integer(),
        maxWorkers=integer(),
        batchSize=integer(),
        maxBatchDelay=integer(),
        workflowDag=text("Which steps follow each."),
        workflowVersion=text(),
        defaultVersion=flag("Whether calls get it that name none."),
        steps=mapping(schema("Step")),
        output=array(text()),
        ongoing=integer("Calls that it is answering.", minimum=0),
        functions=document((), phase=text(), workers=integer()),
        timeout_s=number(),
    ),
    "Workflows": document(
        ("workflows",),
        nextPageToken=text(),
        workflows=array(document(("workflowName", "workflowUrl"), workflowName=text(), workflowUrl=text())),
    ),
}
_NAME = in_path("workflow_name", "The workflow.")
_GONE = {"200": answer("Done.", STATUS), "202": answer("Stored; some replicas have not heard of it yet.", STATUS)}

WORKFLOWS = Part(
    "Workflows",
    "Registered, listed, described. They are asked as models are, by their names.",
    {
        "/workflows": {
            "get": operation(
                "workflows",
                "List workflows by name.",
                {"200": answer("A page of them.", schema("Workflows")), **DIALECT.refusals(400, 500)},
                in_query("limit", "How many at most: 0 to 100; what is not, or is no number, is 100."),
                in_query("next_page_token", "Where the page begins."),
            ),
            "post": operation(
                "register_workflow",
                "Register a workflow, from a .war or from a document.",
                {
                    **_GONE,
                    **DIALECT.refusals(400, 404, 405, 409, 413, 500, 507),
                },
                in_query("url", "A name in the workflow store, or a URL."),
                in_query("workflow_name", "Its name; else the archive's."),
                in_query("response_timeout", "Seconds for an answer of one of its models.", integer()),
                in_query("startup_timeout", "Seconds for their start.", integer()),
                in_query("s3_sse_kms", "true: an https URL of S3's is signed.", text(enum=["true", "false"])),
                body=body(schema("NewWorkflow"), "application/json", "application/yaml", required=False),
            ),
        },
        "/workflows/{workflow_name}": {
            "get": operation(
                "workflow",
                "Every version of a workflow.",
                {
                    "200": answer("The default one first.", array(schema("Workflow"), minItems=1)),
                    **DIALECT.refusals(400, 404, 500),
                },
                _NAME,
            ),
            "delete": operation(
                "unregister_workflow",
                "Unregister a workflow, with the models that came with it.",
                {**_GONE, **DIALECT.refusals(400, 404, 405, 409, 500)},
                _NAME,
            ),
        },
        "/workflows/{workflow_name}/{workflow_version}": {
            "delete": operation(
                "unregister_workflow_version",
                "Unregister one version of it.",
                {**_GONE, **DIALECT.refusals(400, 403, 404, 405, 409, 500)},
                _NAME,
                in_path("workflow_version", "The version."),
            )
        },
    },
    _SCHEMAS,
)
