"""The OpenAPI schemas of requests and responses, and the descriptions and examples that the manual shows.

The examples of responses are those of the bundled model; "…" stands for a part that is omitted.
"""

from __future__ import annotations

from typing import Any

from transduce.insight.embed import POOLS
from transduce.serving.limits import Limits

TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": TEXT},
    "example": {"error": "there is no model from this source to this target, only de to en"},
}
DESCRIPTIONS = {
    "/translate": "Translates a text or a list of texts. Each line is translated alone, and line breaks are kept. The "
    "request and the response are those of LibreTranslate.",
    "/languages": "Returns the languages of this server, and for each source language the languages that it can be "
    "translated to.",
    "/explain": "Translates a line or a list of lines, and returns details: the probability of each token, the most "
    "probable other tokens at its place, and the source words that each word corresponds to. With prefix, the "
    "translation begins with a given text.",
    "/inspect": "Translates one line and returns the attention weights of every layer and head. The response grows "
    "with the square of the number of tokens.",
    "/embed": "Turns a text or a list of texts into vectors, which can be compared to find similar texts. A vector is "
    "the output of the encoder, combined over the tokens of a text.",
    "/limits": "Returns the limits of a request, such as the number of characters.",
    "/health": "Returns whether the process is running, and the engine of each direction. It needs no token and is not "
    "counted by the rate limit.",
    "/ready": "Returns whether the models are loaded and warmed up. Until then the status is 503. It needs no token "
    "and is not counted by the rate limit.",
    "/metrics": "Returns measurements of this server in the text format of Prometheus: requests, times and queues.",
}
"""What each route does, by path."""
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
        "format": {**TEXT, "enum": ["text"], "default": "text", "description": "Only plain text is supported."},
        "alternatives": {
            "type": "integer",
            "minimum": 0,
            "default": 0,
            "description": "The number of translations in addition to the best.",
        },
        "beam": {"type": "integer", "minimum": 1, "description": "The beam size. LibreTranslate does not have it."},
        "api_key": {**TEXT, "description": "The token, unless it is sent as Authorization: Bearer."},
    },
    "example": {"q": "Das ist gut.", "source": "de", "target": "en"},
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
    "description": "The translation. If q is a list, translatedText is a list too.",
    "example": {"translatedText": "That's good."},
}
LANGUAGES = {
    "type": "array",
    "description": "The languages, with a code, a name and the targets of each.",
    "example": [{"code": "de", "name": "German", "targets": ["en"]}, {"code": "en", "name": "English", "targets": []}],
    "items": {
        "type": "object",
        "required": ["code", "name", "targets"],
        "properties": {"code": TEXT, "name": TEXT, "targets": {"type": "array", "items": TEXT}},
    },
}
STATUS = {
    "type": "object",
    "properties": {"status": TEXT},
    "description": "The models are ready.",
    "example": {"status": "ready"},
}
HEALTH = {
    "type": "object",
    "description": "The process is running.",
    "example": {
        "status": "ok",
        "engines": [
            {
                "source": "de",
                "target": "en",
                "engine": "native",
                "precision": "float32",
                "is_fallback": False,
                "reason": "the fastest for this model on this machine",
            }
        ],
    },
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
EXPLAINED_LINES = {
    "type": "object",
    "required": ["lines"],
    "properties": {"lines": {"type": "array", "items": EXPLAINED_LINE}},
}
EXPLANATION = {
    "oneOf": [EXPLAINED_LINE, EXPLAINED_LINES],
    "description": "The details of the translation. If q is a list: an object with one entry in lines for each text.",
    "example": {
        "translatedText": "That's good.",
        "log_prob": -1.01802,
        "alternatives": [],
        "flags": {},
        "tokens": [
            {
                "piece": "▁That",
                "probability": 0.540837,
                "word": 0,
                "runners_up": [["▁This", 0.261177], ["▁It", 0.136732], ["▁I", 0.00128587]],
            },
            "…",
        ],
        "n_first": 6,
        "alignment": [[0, 0], [2, 1]],
    },
}
ATTENTION_RECORDS = {
    "type": "object",
    "description": "The document that transduce inspect --json writes, with the texts that the page shows. The weights "
    "of each layer are numbers of 16 bits, encoded as base64; shape gives layers, heads, rows and columns.",
    "example": {
        "format": "transduce attention",
        "format_version": 1,
        "direction": "de-en",
        "records": [
            {
                "text": "Das ist gut.",
                "translation": "That's good.",
                "source": ["▁Das", "▁ist", "▁gut", ".", "</s>"],
                "target": ["<s>", "▁That", "'", "s", "▁good", "."],
                "weights": {"memory": {"shape": [3, 4, 6, 5], "layers": ["…", "…", "…"]}},
            }
        ],
    },
}
VECTORS = {
    "type": "object",
    "properties": {"vectors": {"type": ["array", "null"], "description": "null for a blank text"}, "pool": TEXT},
    "description": "The vector. If q is a list: one vector for each text, null for a blank one.",
    "example": {"vectors": [-0.0501022, 0.120306, 0.0841175, "…"], "pool": "mean"},
}
LIMITS = {
    "type": "object",
    "additionalProperties": {"type": "number"},
    "description": "The limits by name.",
    "example": {"characters": Limits.characters, "texts": Limits.texts, "beam": Limits.beam},
}


def describe_responses(
    schema: dict[str, Any], *codes: int, content_type: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    description = schema.get("description", "The response is text.")
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": description, "content": {content_type: {"schema": schema}}}
    }
    for code in codes:
        responses[code] = {"description": REFUSALS[code], "content": {"application/json": {"schema": ERROR}}}
    return responses
