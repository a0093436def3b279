"""The OpenAPI schemas of requests and responses."""

from __future__ import annotations

from typing import Any

from transduce.insight.embed import POOLS

TEXT = {"type": "string"}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
REFUSALS = {
    400: "The request is invalid.",
    401: "A token is required.",
    403: "The token is wrong, or pages of this Origin are not allowed.",
    408: "The body arrived too slowly.",
    413: "The request exceeds a limit.",
    415: "The content type of the body is not supported.",
    422: "A number is out of its bounds.",
    429: "Too many requests from this client. Retry-After says when to try again.",
    431: "The address and the headers exceed the limit.",
    503: "The server is overloaded, starting or shutting down. Retry-After says when to try again.",
}
PROBE_REFUSALS = (400, 403, 431)
GET_REFUSALS = tuple(code for code in REFUSALS if code != 422)
"""The refusals of routes that take no numbers."""


def one_or_list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [schema, {"type": "array", "items": schema}]}


# Requests

REQUEST: dict[str, Any] = {
    "type": "object",
    "required": ["q", "source", "target"],
    "properties": {
        "q": {**one_or_list(TEXT), "description": "One text of any number of lines, or a list of texts."},
        "source": {**TEXT, "description": "A language of /languages, or auto if only one is possible."},
        "target": {**TEXT, "description": "A language of /languages."},
        "format": {"type": "string", "enum": ["text"], "default": "text"},
        "alternatives": {
            "type": "integer",
            "minimum": 0,
            "default": 0,
            "description": "The number of translations in addition to the best.",
        },
        "beam": {"type": "integer", "minimum": 1, "description": "The beam size. LibreTranslate does not have it."},
        "api_key": {**TEXT, "description": "The token, unless it is sent as Authorization: Bearer."},
    },
}
PREFIX = {
    **one_or_list(TEXT),
    "description": "How the translation must begin: a text, or a list of pieces as /explain returns them. "
    "It requires that q is one text.",
}
POOL = {
    "type": "string",
    "enum": list(POOLS),
    "default": "mean",
    "description": "How the vectors of the tokens of a text become one vector.",
}
FORMS = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
"""The content types that the server reads."""


def describe_request(*content_types: str, **fields: dict[str, Any]) -> dict[str, Any]:
    """Return the request body of a route. `fields` are added to those of every request."""
    schema = {**REQUEST, "properties": {**REQUEST["properties"], **fields}}
    content = {content_type: {"schema": schema} for content_type in content_types}
    return {"requestBody": {"required": True, "content": content}}


# Responses

DETECTED = {"type": "object", "properties": {"confidence": {"type": "number"}, "language": TEXT}}
TRANSLATION = {
    "type": "object",
    "required": ["translatedText"],
    "properties": {
        "translatedText": one_or_list(TEXT),
        "alternatives": {"type": "array", "items": one_or_list(TEXT)},
        "detectedLanguage": {
            **one_or_list(DETECTED),
            "description": "Only if source is auto: the only possible language. Nothing is detected.",
        },
    },
}
LANGUAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["code", "name", "targets"],
        "properties": {"code": TEXT, "name": TEXT, "targets": {"type": "array", "items": TEXT}},
    },
}
STATUS = {"type": "object", "properties": {"status": TEXT}}
HEALTH = {
    "type": "object",
    "required": ["status", "engines"],
    "properties": {
        "status": TEXT,
        "engines": {
            "type": "array",
            "description": "The engine that translates each direction.",
            "items": {
                "type": "object",
                "required": ["source", "target", "engine", "precision", "is_fallback"],
                "properties": {
                    "source": TEXT,
                    "target": TEXT,
                    "engine": TEXT,
                    "precision": TEXT,
                    "is_fallback": {
                        "type": "boolean",
                        "description": "Whether a faster engine exists, but not for this model or machine.",
                    },
                    "reason": {
                        **TEXT,
                        "description": "Why this engine was chosen. If the server requires a token, only requests that "
                        "send it as Authorization: Bearer receive the reason.",
                    },
                },
            },
        },
    },
}
EXPLAINED_LINE = {
    "type": "object",
    "required": ["translatedText", "log_prob", "alternatives", "flags", "tokens", "n_first", "alignment"],
    "properties": {
        "translatedText": TEXT,
        "log_prob": {"type": "number"},
        "alternatives": {
            "type": "array",
            "items": {"type": "object", "properties": {"text": TEXT, "log_prob": {"type": "number"}}},
        },
        "flags": {"type": "object", "description": "Warnings about the translation, by name."},
        "tokens": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "piece": TEXT,
                    "probability": {"type": "number"},
                    "word": {
                        "type": ["integer", "null"],
                        "description": "The number of its word in the translation. Words are separated by spaces.",
                    },
                    "runners_up": {"type": "array", "items": {"type": "array"}, "description": "[piece, probability]"},
                },
            },
        },
        "n_first": {
            "type": "integer",
            "description": "The number of tokens of the first sentence. A prefix can change only these.",
        },
        "alignment": {
            "type": ["array", "null"],
            "items": {"type": "array", "items": {"type": "integer"}},
            "description": "[source word, target word]; null if the model does not name its alignment heads.",
        },
    },
}
EXPLANATION = {
    "oneOf": [EXPLAINED_LINE, {"type": "object", "properties": {"lines": {"type": "array", "items": EXPLAINED_LINE}}}],
    "description": "If q is a list: an object with lines.",
}
ATTENTION_RECORDS = {
    "type": "object",
    "description": "The document that transduce inspect --json writes, with the names that a page shows.",
}
VECTORS = {
    "type": "object",
    "properties": {"vectors": {"type": ["array", "null"], "description": "null for a blank text"}, "pool": TEXT},
}
LIMITS = {"type": "object", "additionalProperties": {"type": "number"}}


def describe_responses(
    schema: dict[str, Any], *codes: int, content_type: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "Success.", "content": {content_type: {"schema": schema}}}
    }
    for code in codes:
        responses[code] = {"description": REFUSALS[code], "content": {"application/json": {"schema": ERROR}}}
    return responses
