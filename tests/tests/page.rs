//! The status page in a browser, headless Chromium, against made-up answers: no privileges needed.

#[path = "page/scene.rs"]
mod scene;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};
use paatp_tests::browser::{self, Browser, Screen};
use paatp_tests::skip;
use scene::{Scene, Server, job};

/// The browser, or a word that there is none.
fn program(test: &str) -> Option<PathBuf> {
    let program = browser::find();
    if program.is_none() {
        skip(test, "no Chromium; `cargo xtask setup` installs chromium-headless-shell");
    }
    program
}

/// Opens the page of a scene.
fn open(program: &std::path::Path, scene: Scene) -> Result<(Server, Browser)> {
    let server = Server::start(scene)?;
    let mut browser = Browser::start(program, |shell| Command::new(shell))?;
    browser.open(&format!("http://{}/", server.address))?;
    browser.wait_for("the first look was drawn", "document.getElementById('node').children.length > 0")?;
    Ok((server, browser))
}

/// Nothing was said in the console, thrown, or against the policy.
fn assert_clean(browser: &mut Browser) -> Result<()> {
    let problems = browser.problems()?;
    ensure!(problems.is_empty(), "the browser complains: {problems:#?}");
    Ok(())
}

/// Text of what a selector finds first.
fn text(browser: &mut Browser, selector: &str) -> Result<String> {
    browser.text(&format!("document.querySelector({selector:?}).innerText"))
}

#[test]
fn ten_jobs_of_sixteen_ranks() -> Result<()> {
    let Some(program) = program("ten_jobs_of_sixteen_ranks") else { return Ok(()) };
    let mut scene = Scene::new(10, 16);
    scene.stall(3, 5);
    scene.jobs[0]["ranks"][2]["straggler"] = true.into();
    scene.node["counters"]["refusals"]["bad_tag"] = 3.into();
    scene.jobs[3]["sync"] = serde_json::json!({ "mode": "ssp", "staleness": 2, "quorum": 3 });
    scene.jobs[3]["sync_change"] = serde_json::json!({ "before": { "mode": "bsp" }, "from": 5000 });
    let (server, mut browser) = open(&program, scene)?;

    // The job that needs a look is shown first: what it waits for stands in the list, above, and at its ranks.
    assert_eq!(browser.value("document.querySelectorAll('#jobs tbody tr').length")?, 10);
    assert_eq!(browser.value("document.querySelectorAll('#ranks tbody tr').length")?, 16);
    assert_eq!(text(&mut browser, "#job-title")?, "Job train-3");
    let waits = "waits for contributions of rank 5 for 3.2 s, 64 chunks behind";
    assert!(text(&mut browser, "#notices li")?.contains(waits));
    assert!(text(&mut browser, "#job-stall")?.contains(waits));
    assert!(text(&mut browser, "#job-facts")?.contains("chunk 4,711, 3.2 s: lacks rank 5, has 3 others"));
    assert!(text(&mut browser, "#jobs tbody tr:nth-child(4)")?.contains("rank 5, 3.2 s"));
    let sync = "a quorum of 3, staleness 2 (ssp) from chunk 5,000 on, all ranks (bsp) before";
    assert!(text(&mut browser, "#job-facts")?.contains(sync));
    assert_eq!(text(&mut browser, "#verdict-text")?, "Needs a look (1)");
    assert_eq!(browser.value("document.querySelectorAll('#ranks .straggler').length")?, 1);
    let held = text(&mut browser, "#ranks .held")?;
    assert!(held.contains("rank 5") && held.contains("the others wait for it, 3.2 s"), "{held}");
    // By shape as well: a triangle, where others have none.
    let shape = |rank: u8| {
        format!(
            "getComputedStyle(document.querySelectorAll('#ranks tbody .mark')[{rank}]).display + ' ' + \
getComputedStyle(document.querySelectorAll('#ranks tbody .mark')[{rank}]).clipPath"
        )
    };
    assert!(browser.text(&shape(5))?.starts_with("inline-block polygon("));
    assert!(browser.text(&shape(4))?.starts_with("none"));
    // Refusals with their sentence.
    let refusals = text(&mut browser, "#refusals tbody")?;
    assert!(
        refusals.contains("bad_tag") && refusals.contains("The payload failed its checksum"),
        "{refusals}"
    );
    let node = text(&mut browser, "#node")?;
    assert!(node.contains("native, held by bpf_link, program 123") && node.contains("Pinned"), "{node}");

    // Plots: five minutes, then what is new moves them, asked for from where they end.
    let points = "document.querySelector('#plot .line').getAttribute('d').split('L').length";
    assert_eq!(browser.value(points)?, 299);
    let line = "document.querySelector('#ranks tbody tr:nth-child(7) .line').getAttribute('d')";
    let (before, next) = (browser.text(line)?, server.scene().second + 1);
    server.scene().second += 1;
    browser.wait_for("the plot moved", &format!("{line} !== {before:?}"))?;
    assert_eq!(browser.value(points)?, 299);
    assert!(server.scene().asked.contains(&format!("/v1/history?job=train-3&since={next}")));

    // What a screen reader gets: the news without seconds, tables with their names, one link for each job.
    let tree = browser.accessible()?;
    let has = |role: &str, name: &str| tree.iter().any(|(r, n)| r == role && n.contains(name));
    assert!(
        has("status", "") && has("heading", "Job train-3") && has("image", "The band reaches"),
        "{tree:?}"
    );
    assert!(has("link", "train-9") && has("columnheader", "Throughput") && has("rowheader", "rank 5"));
    assert_eq!(text(&mut browser, "#news")?, "Job train-3 waits for rank 5.");
    let tasks = browser.value("longTasks")?;
    eprintln!("tasks of more than 50 ms: {tasks}");
    assert_clean(&mut browser)
}

#[test]
fn the_keyboard_reaches_everything() -> Result<()> {
    let Some(program) = program("the_keyboard_reaches_everything") else { return Ok(()) };
    let (_server, mut browser) = open(&program, Scene::new(10, 4))?;
    let focused = "(document.activeElement.id || document.activeElement.textContent)";
    browser.press("Tab")?;
    assert_eq!(browser.text(focused)?, "skip");
    browser.press("Tab")?;
    assert_eq!(browser.text(focused)?, "train-0");
    let outline = browser.text("getComputedStyle(document.activeElement).outlineStyle")?;
    assert_eq!(outline, "solid", "the focus can be seen");
    browser.press("ArrowDown")?;
    browser.press("ArrowDown")?;
    assert_eq!(browser.text(focused)?, "train-2");
    browser.press("ArrowUp")?;
    browser.press("Enter")?;
    browser.wait_for(
        "another job was shown",
        "document.getElementById('job-title').textContent === 'Job train-1'",
    )?;
    assert_eq!(browser.text("location.hash")?, "#job=train-1");
    assert_eq!(text(&mut browser, "#jobs [aria-current=true]")?, "train-1");
    browser.press("End")?;
    assert_eq!(browser.text(focused)?, "train-9");
    // The focus stays where it is while the page draws itself anew, and no key is caught: Tab leaves the list, and in the
    // end the page.
    let drawn = "performance.getEntriesByName(`${location.origin}/v1/status`).length";
    let looks = browser.value(drawn)?;
    browser.wait_for("the page was drawn again", &format!("{drawn} > {looks} + 1"))?;
    assert_eq!(browser.text(focused)?, "train-9");
    let mut met = Vec::new();
    for _ in 0..6 {
        browser.press("Tab")?;
        met.push(browser.text(focused)?);
    }
    assert_eq!(met[0], "What else was counted", "{met:?}");
    assert!(met.contains(&"/v1/status".into()), "{met:?}");
    // The skip link leads to the job without changing which.
    browser.value("document.getElementById('skip').focus()")?;
    browser.press("Enter")?;
    browser.wait_for("the job had the focus", "document.activeElement.id === 'job'")?;
    assert_eq!(browser.text("location.hash")?, "#job=train-1");
    assert_clean(&mut browser)
}

#[test]
fn light_and_dark_small_and_large() -> Result<()> {
    let Some(program) = program("light_and_dark_small_and_large") else { return Ok(()) };
    let mut scene = Scene::new(10, 16);
    scene.stall(0, 1);
    scene.jobs[0]["ranks"][1]["address"] = "fd00:1234:5678:9abc:def0:1234:5678:9abc".into();
    scene.jobs[1]["name"] = "a-rather-long-name.of-a-job_that-somebody-gave-it-0123456789abcd".into();
    scene.node["counters"]["refusals"]["ahead"] = 123_456_789.into();
    let (_server, mut browser) = open(&program, scene)?;
    let ground = "getComputedStyle(document.body).backgroundColor";
    for (scheme, colour) in [("light", "rgb(247, 247, 245)"), ("dark", "rgb(18, 20, 24)")] {
        for width in [360, 600, 768, 1280, 2560] {
            browser.show_on(Screen { width, height: 900, scale: 1.0, scheme })?;
            assert_eq!(browser.text(ground)?, colour);
            let wide = browser.value("document.documentElement.scrollWidth")?;
            assert_eq!(wide, width, "{scheme}: the page is wider than the screen");
            let hidden = "[...document.querySelectorAll('#ranks tbody td, #jobs tbody td')].filter(\
(cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.innerText)";
            assert_eq!(browser.value(hidden)?, serde_json::json!([]), "{scheme} {width}: text is cut off");
        }
    }
    // On a telephone each cell names its column.
    browser.show_on(Screen { width: 360, height: 800, scale: 2.0, scheme: "dark" })?;
    let label = "getComputedStyle(document.querySelector('#ranks td:nth-child(5)'), '::before').content";
    assert_eq!(browser.text(label)?, "\"Behind\"");
    assert_eq!(browser.value("document.getAnimations().length")?, 0, "nothing moves by itself");
    assert!(browser.screenshot()?.starts_with(b"\x89PNG"));
    assert_clean(&mut browser)
}

/// Whatever the aggregator says is text.
#[test]
fn text_from_outside_stays_text() -> Result<()> {
    let Some(program) = program("text_from_outside_stays_text") else { return Ok(()) };
    let evil = "<img src=x onerror=\"window.harmed=1\"><script>window.harmed=1</script>";
    let mut scene = Scene::new(0, 0);
    let mut job = job(0, evil, 2);
    job["ranks"][0]["address"] = evil.into();
    job["state"] = evil.into();
    scene.jobs = vec![job];
    scene.stall(0, 1);
    scene.jobs[0]["stall"]["sentence"] = evil.into();
    scene.node["health"]["notices"][0]["sentence"] = evil.into();
    scene.node["attachment"]["interface"] = evil.into();
    scene.node["build"]["version"] = evil.into();
    scene.node["counters"]["refusals"] = serde_json::json!({ evil: 5 });
    let (_server, mut browser) = open(&program, scene)?;
    browser
        .wait_for("the plots were there", "document.querySelector('#plot .line').getAttribute('d') !== ''")?;
    assert_eq!(text(&mut browser, "#job-title")?, format!("Job {evil}"));
    assert_eq!(text(&mut browser, "#refusals tbody th")?, evil);
    browser.value("location.hash = '#job=<img src=x onerror=harmed=1>'")?;
    browser.wait_for("it went on", "document.querySelectorAll('#jobs tbody tr').length === 1")?;
    assert_eq!(
        browser.value("document.images.length + document.scripts.length")?,
        1,
        "the page's own script"
    );
    assert_eq!(browser.value("window.harmed === undefined")?, true);
    assert_clean(&mut browser)
}

#[test]
fn silence_is_said_and_ends_by_itself() -> Result<()> {
    let Some(program) = program("silence_is_said_and_ends_by_itself") else { return Ok(()) };
    let (mut server, mut browser) = open(&program, Scene::new(2, 4))?;
    assert_eq!(browser.value("document.getElementById('stale').hidden")?, true);
    assert_eq!(text(&mut browser, "#verdict-text")?, "All is well");
    assert_clean(&mut browser)?;
    server.stop();
    browser.wait_for("old data is marked", "!document.getElementById('stale').hidden")?;
    let stale = text(&mut browser, "#stale")?;
    let words = stale.starts_with("The aggregator does not answer (") && stale.contains(" old, of ");
    assert!(words && stale.ends_with("Asking again every second."), "{stale}");
    assert_eq!(text(&mut browser, "#verdict-text")?, "No answer");
    assert_eq!(text(&mut browser, "#news")?, "The aggregator does not answer.");
    // What was known stays, and its age grows.
    assert_eq!(browser.value("document.querySelectorAll('#jobs tbody tr').length")?, 2);
    browser.wait_for("the age grew", &format!("document.getElementById('stale').innerText !== {stale:?}"))?;
    // Somebody else answers, who has run for two seconds only.
    (server.scene().second, server.scene().node["build"]["version"]) = (2, "0.2.0".into());
    server.resume()?;
    browser.wait_for("it goes on", "document.getElementById('stale').hidden")?;
    browser.wait_for("the version is new", "document.getElementById('version').innerText === '0.2.0'")?;
    let points = "document.querySelector('#plot .line').getAttribute('d').split('L').length";
    browser.wait_for("the plot began anew", &format!("{points} === 2"))?;
    // The browser itself says that it could not connect; nothing else is wrong.
    let problems = browser.problems()?;
    assert!(problems.iter().all(|problem| problem.contains("ERR_")), "{problems:#?}");

    server.scene().refuses = Some(503);
    browser.wait_for(
        "a refusal is told",
        "document.getElementById('stale').innerText.includes('too many who look')",
    )?;
    server.scene().refuses = None;
    browser.wait_for("it goes on again", "document.getElementById('stale').hidden")
}

#[test]
fn an_empty_node_says_what_to_do() -> Result<()> {
    let Some(program) = program("an_empty_node_says_what_to_do") else { return Ok(()) };
    let (server, mut browser) = open(&program, Scene::new(0, 0))?;
    let empty = text(&mut browser, "#empty")?;
    assert!(
        empty.contains("paatp job create train --world 4") && empty.contains("--aggregator 127.0.0.1"),
        "{empty}"
    );
    assert_eq!(browser.value("document.getElementById('job').hidden")?, true);
    assert_eq!(text(&mut browser, "#refusals-none")?, "None.");
    // Jobs come, ranks wait for others, the node is drained, and all goes again.
    let mut scene = Scene::new(1, 3);
    let job = &mut scene.jobs[0];
    (job["state"], job["generation"], job["forming_seconds"]) = ("forming".into(), ().into(), 0.8.into());
    (job["waiting_ranks"], job["missing_ranks"]) = (vec![0].into(), vec![1, 2].into());
    (job["ranks"][0]["state"], job["ranks"][1]["state"]) = ("waiting".into(), "missing".into());
    scene.node["node"]["draining"] = true.into();
    let notice = "draining: no new jobs and ranks; what runs goes on";
    scene.node["health"] = serde_json::json!({ "level": "notice", "notices": [
        { "level": "notice", "job": null, "sentence": notice },
    ] });
    (server.scene().jobs, server.scene().node) = (scene.jobs, scene.node);
    browser
        .wait_for("the job is shown", "document.getElementById('job-title').textContent === 'Job train-0'")?;
    let facts = text(&mut browser, "#job-facts")?;
    assert!(facts.contains("800 ms: rank 0 waiting, ranks 1 and 2 missing"), "{facts}");
    assert!(text(&mut browser, "#ranks tbody tr:nth-child(2)")?.contains("others wait for it to join"));
    assert_eq!(text(&mut browser, "#verdict-text")?, "Drained");
    assert_eq!(text(&mut browser, "#notices")?, notice);
    server.scene().jobs.clear();
    browser.wait_for("it is empty again", "!document.getElementById('empty').hidden")?;
    assert_eq!(browser.value("document.getElementById('job').hidden")?, true);
    assert_clean(&mut browser)
}

/// A test that finds no errors is worth something only if it would find some.
#[test]
fn errors_and_breaches_would_be_seen() -> Result<()> {
    let Some(program) = program("errors_and_breaches_would_be_seen") else { return Ok(()) };
    let (_server, mut browser) = open(&program, Scene::new(1, 2))?;
    assert_clean(&mut browser)?;
    browser.value("document.body.setAttribute('style', 'color: red')")?;
    browser.value("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.2/x\" onerror=\"harmed = 1\">')")?;
    browser.value("fetch('http://127.0.0.2:1/').catch(() => 0)")?;
    browser.value("void setTimeout(() => { throw new Error('on purpose') }, 0)")?;
    browser.wait_for("all was seen", "violations.length >= 4")?;
    let problems = browser.problems()?.join("\n");
    for seen in ["style-src-attr", "img-src http://127.0.0.2", "script-src-attr", "connect-src", "on purpose"]
    {
        assert!(problems.contains(seen), "{seen} was not seen in:\n{problems}");
    }
    Ok(())
}
