//! The status page, `/`: HTML, style and script as they lie in this folder. Nothing of it is built, nothing is fetched from
//! elsewhere, and it changes nothing: the script asks `/v1/status` and `/v1/history`, and draws.

use std::collections::BTreeMap;

use axum::Router;
use axum::extract::Request;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::get;
use paatp_common::counter::{Event, Refusal};
use serde::Serialize;

use crate::control::error::ControlError;
use crate::control::http::{Peer, Scope};

/// What the page may do: have its own style, script and icon, and ask its own server. No other site, nothing inline, no
/// forms, and no place in another site's frame.
pub const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// One file of the page.
#[derive(Clone, Copy, Debug)]
pub struct Asset {
    /// Where it is.
    pub path: &'static str,
    /// What it is.
    pub media_type: &'static str,
    /// What is in it.
    pub text: &'static str,
}

/// All files but [`WORDS`].
pub const ASSETS: [Asset; 4] = [
    Asset { path: "/", media_type: "text/html; charset=utf-8", text: include_str!("index.html") },
    Asset { path: "/page/style.css", media_type: "text/css; charset=utf-8", text: include_str!("style.css") },
    Asset {
        path: "/page/script.js",
        media_type: "text/javascript; charset=utf-8",
        text: include_str!("script.js"),
    },
    Asset { path: "/page/icon.svg", media_type: "image/svg+xml", text: include_str!("icon.svg") },
];

/// Where the sentences of all counters are, for the script.
pub const WORDS: &str = "/page/words.json";

/// What each counter means.
#[derive(Debug, Serialize)]
pub struct Words {
    refusals: BTreeMap<&'static str, &'static str>,
    events: BTreeMap<&'static str, &'static str>,
}

impl Words {
    /// All counters.
    #[must_use]
    pub fn all() -> Words {
        Words {
            refusals: Refusal::ALL.iter().map(|refusal| (refusal.name(), refusal.sentence())).collect(),
            events: Event::ALL.iter().map(|event| (event.name(), event.sentence())).collect(),
        }
    }
}

/// The page, for whoever may see the node: reading needs no token, but workers' addresses do not offer it.
pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let router = ASSETS.iter().fold(Router::new(), |router, asset| {
        let Asset { path, media_type, text } = *asset;
        router.route(path, get(move |request: Request| async move { answer(&request, media_type, text) }))
    });
    router.route(WORDS, get(words))
}

async fn words(request: Request) -> Response {
    answer(&request, "application/json", Json(Words::all()))
}

fn answer(request: &Request, media_type: &'static str, text: impl IntoResponse) -> Response {
    let peer = request.extensions().get::<Peer>();
    if !peer.is_some_and(|peer| peer.scope == Scope::Management) {
        return ControlError::NotHere.into_response();
    }
    let headers = [
        (CONTENT_TYPE, media_type),
        (CONTENT_SECURITY_POLICY, POLICY),
        // Page and script change with the program.
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests;
