// Draws what GET /v1/status and GET /v1/history say, once a second. Changes nothing at the aggregator. Whatever comes from
// outside (names, addresses, sentences) is put in as text, never as markup.

const LOOK_EVERY = 1000; // ms between two looks
const GIVE_UP_AFTER = 5000; // ms for an answer
const STALE_AFTER = 3000; // ms without an answer until the page says so
const SAMPLES = 300; // of the history, about a second each
const SHORTEST_PLOT = 60; // s
const SAME_START = 2; // s that two looks may differ about when the aggregator started
const MINUTE = 60; // s over which counters' growth is told
const [PLOT_WIDTH, PLOT_HEIGHT, SPARK_WIDTH, SPARK_HEIGHT] = [1000, 140, 300, 28];

const $ = (id) => document.getElementById(id);

// ---- Words and numbers ----

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const count = (number) => (number === null ? "not counted" : whole.format(number));

/** Three digits and a prefix: "12.3 k". */
function prefixed(number, unit) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  let place = 0;
  while (Math.abs(number) >= 999.5 && place < prefixes.length - 1) {
    number /= 1000;
    place += 1;
  }
  const digits = place === 0 || number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2;
  return `${number.toFixed(digits)}\u00a0${prefixes[place]}${unit}`;
}

function bytes(number) {
  const mebibytes = number / 2 ** 20;
  return mebibytes < 1024 ? `${mebibytes.toFixed(1)}\u00a0MiB` : `${(mebibytes / 1024).toFixed(2)}\u00a0GiB`;
}

/** A time as people say it: "40 ms", "2.5 s", "3 min 20 s", "2 h 5 min", "3 d 4 h". */
function span(seconds) {
  const two = (large, unit, small, smaller) => (small === 0 ? `${large} ${unit}` : `${large} ${unit} ${small} ${smaller}`);
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${Math.round(seconds * 10) / 10} s`;
  const rounded = Math.round(seconds);
  if (rounded < 120) return `${rounded} s`;
  const [minutes, hours] = [Math.floor(rounded / 60), Math.floor(rounded / 3600)];
  if (minutes < 120) return two(minutes, "min", rounded % 60, "s");
  if (hours < 48) return two(hours, "h", minutes % 60, "min");
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

function ranks(list) {
  if (list.length === 0) return "no rank";
  if (list.length === 1) return `rank ${list[0]}`;
  return `ranks ${list.slice(0, -1).join(", ")} and ${list.at(-1)}`;
}

/** Bits a second of payload, if all chunks are full. */
const payload = (chunksPerSecond, lanes) => prefixed(chunksPerSecond * lanes * 32, "bit/s");

function syncWords(sync) {
  const needed = sync.quorum == null ? "all ranks" : `a quorum of ${sync.quorum}`;
  const bounds = { bsp: " (bsp)", ssp: `, staleness ${sync.staleness} (ssp)`, asp: ", without a bound (asp)" };
  return needed + (bounds[sync.mode] ?? "");
}

/** How ranks wait for one another, and the change to that, if one is under way. */
function jobSyncWords(job) {
  const [now, change] = [syncWords(job.sync), job.sync_change];
  if (change === null) return now;
  const from = change.from === null ? "one of the next chunks" : `chunk ${count(change.from)}`;
  return `${now} from ${from} on, ${syncWords(change.before)} before`;
}

const RANK_STATES = {
  absent: "not there",
  missing: "missing: others wait for it to join",
  waiting: "waits for others to join",
  member: "takes part",
  left: "done",
  lost: "lost: held the others up for too long",
};

/** How a rank does, and how it is marked. */
function rankWords(job, rank) {
  const held = job.stall !== null && job.stall.missing_ranks.includes(rank.rank);
  if (held && rank.state === "member") {
    return { words: `the others wait for it, ${span(rank.in_the_way_seconds ?? job.stall.seconds)}`, held, straggler: true };
  }
  if (rank.straggler && rank.state === "member") {
    return { words: "far behind, the others wait", held, straggler: true };
  }
  return { words: RANK_STATES[rank.state] ?? rank.state, held, straggler: rank.straggler };
}

// ---- The document ----

/** Writes only what is new: what stays as it is keeps its selection, and screen readers keep quiet. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Makes as many rows as there are keys, in their order, and keeps those that are there. */
function rowsFor(body, template, keys) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  keys.forEach((key, place) => {
    let row = known.get(key);
    known.delete(key);
    if (row === undefined) {
      row = $(template).content.firstElementChild.cloneNode(true);
      row.dataset.key = key;
    }
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  for (const row of known.values()) row.remove();
  return [...body.children];
}

/** A list of terms and what they are. */
function facts(list, pairs) {
  pairs.forEach(([term, words], place) => {
    let group = list.children[place];
    if (group === undefined) {
      group = document.createElement("div");
      group.append(document.createElement("dt"), document.createElement("dd"));
      list.append(group);
    }
    setText(group.firstElementChild, term);
    setText(group.lastElementChild, words);
  });
  while (list.children.length > pairs.length) list.lastElementChild.remove();
}

// ---- Plots ----

const round = (number) => Math.round(number * 10) / 10;

/** A line through points; `null` breaks it. */
function line(points) {
  let path = "";
  let pen = "M";
  for (const point of points) {
    if (point === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${round(point[0])} ${round(point[1])}`;
    pen = "L";
  }
  return path;
}

/** The surface between two lines. */
function surface(upper, lower) {
  if (upper.length === 0) return "";
  return `${line(upper)}${line([...lower].reverse()).replace("M", "L")}Z`;
}

/** The next number that is good to read: 1, 2 or 5 and zeros. */
function nice(number) {
  if (number <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= number);
}

/** The last minutes of a job, made of the answers to several questions. */
class Past {
  next = 0;
  times = [];
  steps = [];

  take(series) {
    if (series.first !== this.next || this.steps.length !== series.ranks.length) {
      [this.times, this.steps] = [[], series.ranks.map(() => [])];
    }
    this.next = series.next;
    this.times.push(...series.uptime_seconds);
    series.ranks.forEach((rank, place) => this.steps[place].push(...rank.contributed));
    const surplus = this.times.length - SAMPLES;
    if (surplus > 0) [this.times, ...this.steps].forEach((list) => list.splice(0, surplus));
  }

  /** Seconds that a plot reaches back. */
  get reach() {
    const [first, last] = [this.times[0] ?? 0, this.times.at(-1) ?? 0];
    return Math.max(SHORTEST_PLOT, Math.ceil((last - first) / 10) * 10);
  }

  /** Where each sample but the first is, from 0 to `width`. The first counts over a time that nobody knows. */
  places(width) {
    const last = this.times.at(-1);
    return this.times.slice(1).map((time) => width * (1 - (last - time) / this.reach));
  }

  /** Chunks a second. */
  rates(place) {
    return this.steps[place].slice(1).map((step, at) => step / Math.max(0.001, this.times[at + 1] - this.times[at]));
  }

  /** Chunks since the plot begins. */
  sums(place) {
    let sum = 0;
    return this.steps[place].slice(1).map((step) => (sum += step));
  }
}

// ---- What is known ----

const state = {
  status: null, // the last answer
  start: null, // of the aggregator, in seconds since 1970
  answered: 0, // when it came, by this machine's clock, in ms
  failure: null, // why there is none, if so
  selected: null, // name of the job that is shown
  pasts: new Map(), // by name
  counters: [], // {time, refusals, events} of the last minute
  words: { refusals: {}, events: {} },
  told: "", // what was last said to screen readers
};

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(GIVE_UP_AFTER) });
  const text = await answer.text();
  if (!answer.ok) {
    let why = `HTTP status ${answer.status}`;
    try {
      why = JSON.parse(text).detail ?? why;
    } catch {
      // Something else than the aggregator answers; its status says enough.
    }
    throw new Error(why);
  }
  return JSON.parse(text);
}

/** The job that is asked for by the address, or the one that needs a look most. */
function choose(jobs) {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("job");
  for (const name of [wanted, state.selected]) {
    if (jobs.some((job) => job.name === name)) return name;
  }
  const first = jobs.find((job) => job.stall !== null) ?? jobs.find((job) => job.generation !== null) ?? jobs[0];
  return first?.name ?? null;
}

async function look() {
  const status = await ask("/v1/status");
  const start = status.unix_seconds - status.uptime_seconds;
  if (Math.abs(start - (state.start ?? start)) > SAME_START) {
    // Another process answers: its samples and counters begin anew.
    state.pasts.clear();
    state.counters = [];
  }
  state.selected = choose(status.jobs);
  const names = new Set(status.jobs.map((job) => job.name));
  for (const name of state.pasts.keys()) if (!names.has(name)) state.pasts.delete(name);
  [state.status, state.start] = [status, start];
  state.answered = Date.now();
  state.failure = null;
  state.counters.push({ time: status.uptime_seconds, ...status.counters });
  // One that is a minute old stays, to be compared with.
  while (state.counters.length > 2 && state.counters[1].time < status.uptime_seconds - MINUTE) state.counters.shift();
  await remember(state.selected);
}

/** Asks for what is new in the past of a job. */
async function remember(name) {
  if (name === null) return;
  const past = state.pasts.get(name) ?? new Past();
  const series = await ask(`/v1/history?job=${encodeURIComponent(name)}&since=${past.next}`);
  // A job that was created again counts from zero.
  if (series.next < past.next) {
    state.pasts.delete(name);
    return;
  }
  past.take(series);
  state.pasts.set(name, past);
}

// ---- Drawing ----

function drawVerdict() {
  const { status } = state;
  const silent = Date.now() - state.answered;
  const old = state.failure !== null && (status === null || silent > STALE_AFTER);
  document.body.classList.toggle("old", old);
  $("stale").hidden = !old;
  let [level, words] = ["unknown", "Asking the aggregator…"];
  if (old) {
    const since = new Date(state.answered).toLocaleTimeString("en-GB");
    const shown = status === null ? "" : ` What is shown is ${span(silent / 1000)} old, of ${since}.`;
    setText($("stale"), `The aggregator does not answer (${state.failure}).${shown} Asking again every second.`);
    [level, words] = ["unknown", "No answer"];
  } else if (status !== null) {
    ({ level } = status.health);
    const calm = status.node.draining ? "Drained" : "Running";
    const troubles = status.health.notices.filter((notice) => notice.level === "trouble").length;
    words = { well: "All is well", notice: calm, trouble: `Needs a look (${troubles})` }[level];
  }
  setAttribute($("verdict"), "data-level", level);
  setText($("verdict-text"), words);
  tell(old ? "The aggregator does not answer." : status === null ? "" : headlines(status));
}

/** What screen readers are told: the news without the seconds that change with every look. */
function headlines(status) {
  const held = status.jobs.filter((job) => job.stall !== null);
  const jobs = held.map((job) => `Job ${job.name} waits for ${ranks(job.stall.missing_ranks)}.`);
  const failed = status.jobs.filter((job) => job.state === "failed").map((job) => `Job ${job.name} failed.`);
  const rest = status.problems.length > 0 ? ["Tables cannot be read."] : [];
  const all = [...jobs, ...failed, ...rest];
  return all.length === 0 ? "All is well." : all.join(" ");
}

function tell(words) {
  if (words === state.told) return;
  state.told = words;
  setText($("news"), words);
}

function drawNotices(health) {
  const list = $("notices");
  while (list.children.length > health.notices.length) list.lastElementChild.remove();
  health.notices.forEach((notice, place) => {
    const item = list.children[place] ?? list.appendChild(document.createElement("li"));
    item.className = "note";
    setAttribute(item, "data-level", notice.level);
    setText(item, notice.sentence);
  });
}

function drawNode(status) {
  const { node, attachment } = status;
  const given = node.slots - node.free_slots;
  setText($("version"), status.build.version);
  facts($("node"), [
    ["Interface", attachment.interface || "none"],
    ["XDP program", attachment.mode ? `${attachment.mode}, held by ${attachment.held_by}, program ${attachment.program}` : "none"],
    ["Pinned", attachment.pinned ? `at ${attachment.pinned}` : "no: if the aggregator is killed, jobs that run end with it"],
    ["Takes jobs and ranks", node.draining ? "no, it is drained" : "yes"],
    ["Up for", span(status.uptime_seconds)],
    ["Jobs", `${node.jobs} of ${node.max_jobs}, ${node.running_jobs} run`],
    ["Memory for slots", `${bytes(given * node.slot_bytes)} of ${bytes(node.slots * node.slot_bytes)} given to jobs`],
    ["Slots in use", status.slots_in_use === null ? "not counted" : `${count(status.slots_in_use)} of ${count(node.slots)}`],
    ["Core loop", `went round ${span(status.core_age_seconds)} ago`],
  ]);
}

function drawJobs(status) {
  const { jobs } = status;
  setText($("jobs-count"), jobs.length > 0 ? String(jobs.length) : "");
  $("empty").hidden = jobs.length > 0;
  $("jobs").hidden = jobs.length === 0;
  setText($("here"), location.hostname);
  const rows = rowsFor($("jobs").tBodies[0], "job-row", jobs.map((job) => job.name));
  jobs.forEach((job, place) => {
    const [name, phase, world, results, rate, behind, waits] = rows[place].children;
    const link = name.firstElementChild;
    setText(link, job.name);
    setAttribute(link, "href", `#job=${encodeURIComponent(job.name)}`);
    setAttribute(link, "aria-current", String(job.name === state.selected));
    setText(phase, job.state);
    setText(world, String(job.world));
    setText(results, prefixed(job.chunks_per_second, "chunk/s"));
    setText(rate, payload(job.chunks_per_second, job.lanes));
    setText(behind, job.lag_chunks === 0 ? "0" : count(job.lag_chunks));
    setAttribute(waits, "data-level", job.stall === null ? "well" : "trouble");
    setText(waits, job.stall === null ? "–" : `${ranks(job.stall.missing_ranks)}, ${span(job.stall.seconds)}`);
  });
}

function drawJob(job) {
  $("job").hidden = job === undefined;
  $("skip").hidden = job === undefined;
  if (job === undefined) return;
  setText($("job-title"), `Job ${job.name}`);
  $("job-stall").hidden = job.stall === null;
  setText($("job-stall").lastElementChild, job.stall === null ? "" : job.stall.sentence);
  const open = job.oldest_open_slot;
  const waiting = open === null
    ? "nothing"
    : `chunk ${count(open.chunk)}, ${span(open.age_seconds)}: lacks ${ranks(open.missing_ranks)}, has ${open.contributors.length} others`;
  const forming = job.forming_seconds === null
    ? []
    : [["Forming", `${span(job.forming_seconds)}: ${ranks(job.waiting_ranks)} waiting, ${ranks(job.missing_ranks)} missing`]];
  facts($("job-facts"), [
    ["State", job.state],
    ["Generation", job.generation === null ? "none" : String(job.generation)],
    ["Results wait for", jobSyncWords(job)],
    ["Throughput", `${prefixed(job.chunks_per_second, "chunk/s")}, ${payload(job.chunks_per_second, job.lanes)}`],
    ["Results so far", `${count(job.completed_chunks)} chunks`],
    ["Window, lanes", `${job.window} chunks, ${job.lanes}`],
    ["Slots in use", job.slots_in_use === null ? "not counted" : `${count(job.slots_in_use)} of ${count(job.slots)}`],
    ["A rank may hold others up", job.timeout_seconds === null ? "for ever" : `${span(job.timeout_seconds)}, then ${job.on_failure}`],
    ["Oldest open chunk", waiting],
    ...forming,
  ]);
  const past = state.pasts.get(job.name) ?? new Past();
  const top = drawPlot(job, past);
  drawRanks(job, past, top);
}

/** Returns the top of the scale, in chunks a second. */
function drawPlot(job, past) {
  const rates = past.steps.map((_, place) => past.rates(place));
  const places = past.places(PLOT_WIDTH);
  const highest = places.map((_, at) => Math.max(...rates.map((rate) => rate[at])));
  const lowest = places.map((_, at) => Math.min(...rates.map((rate) => rate[at])));
  const top = nice(highest.reduce((a, b) => Math.max(a, b), 0));
  const point = (rate, at) => [places[at], PLOT_HEIGHT - (rate / top) * (PLOT_HEIGHT - 4)];
  const [upper, lower] = [highest.map(point), lowest.map(point)];
  const [, band, slowest] = $("plot").children;
  setAttribute(band, "d", surface(upper, lower));
  setAttribute(slowest, "d", line(lower));
  setText($("plot-top"), `${prefixed(top, "chunk/s")} = ${payload(top, job.lanes)}`);
  setText(document.querySelector(".times .past"), `${span(past.reach)} ago`);
  const now = lowest.length === 0 ? "" : `slowest ${prefixed(lowest.at(-1), "chunk/s")}, fastest ${prefixed(highest.at(-1), "chunk/s")}`;
  setText($("plot-now"), now);
  return top;
}

function drawRanks(job, past, top) {
  const rows = rowsFor($("ranks").tBodies[0], "rank-row", job.ranks.map((rank) => `${job.name} ${rank.rank}`));
  const places = past.places(SPARK_WIDTH);
  const sums = past.steps.map((_, place) => past.sums(place));
  const first = places.map((_, at) => Math.max(...sums.map((sum) => sum[at])));
  const furthest = Math.max(1, first.at(-1) ?? 0);
  const onScale = (scale) => (value, at) => [places[at], SPARK_HEIGHT - 1 - (value / scale) * (SPARK_HEIGHT - 2)];
  const leader = line(first.map(onScale(furthest)));
  job.ranks.forEach((rank, place) => {
    const [, phase, rate, progress, behind, busy, marks] = rows[place].children;
    const { words, held, straggler } = rankWords(job, rank);
    rows[place].className = [straggler && "straggler", held && "held"].filter(Boolean).join(" ");
    setText(rows[place].querySelector(".rank"), `rank ${rank.rank}`);
    setText(phase.children[0], words);
    setText(phase.children[1], rank.address ?? "");
    const rates = (past.steps[place] === undefined ? [] : past.rates(place)).map(onScale(top));
    const [area, over] = rate.querySelectorAll("path");
    setAttribute(over, "d", line(rates));
    setAttribute(area, "d", surface(rates, places.map((x) => [x, SPARK_HEIGHT])));
    setText(rate.querySelector(".value"), prefixed(rank.chunks_per_second, "chunk/s"));
    const [ahead, own] = progress.querySelectorAll("path");
    const sum = sums[place] ?? [];
    setAttribute(ahead, "d", leader);
    setAttribute(own, "d", line(sum.map(onScale(furthest))));
    setText(progress.querySelector(".value"), prefixed(sum.at(-1) ?? 0, "chunks"));
    setText(behind, count(rank.lag_chunks));
    setText(busy, count(rank.busy));
    setText(marks, count(rank.marks));
  });
}

/** Rows of counters that are not zero. */
function drawCounters(table, kind) {
  const [old, now] = [state.counters[0], state.counters.at(-1)];
  const names = Object.keys(now[kind]).filter((name) => now[kind][name] > 0);
  const rows = rowsFor($(table).tBodies[0], "counter-row", names);
  names.forEach((name, place) => {
    const [title, total, recent, meaning] = rows[place].children;
    setText(title, name);
    setText(total, count(now[kind][name]));
    setText(recent, count(now[kind][name] - (old[kind][name] ?? 0)));
    setText(meaning, state.words[kind][name] ?? "");
  });
  return names.length;
}

function draw() {
  drawVerdict();
  const { status } = state;
  if (status === null) return;
  drawNotices(status.health);
  drawNode(status);
  drawJobs(status);
  drawJob(status.jobs.find((job) => job.name === state.selected));
  const refused = drawCounters("refusals", "refusals");
  $("refusals").hidden = refused === 0;
  $("refusals-none").hidden = refused > 0;
  drawCounters("events", "events");
  document.title = status.health.level === "trouble" ? "▲ paatp" : "paatp";
}

// ---- Going on for ever ----

async function turn() {
  // Nobody looks.
  if (!document.hidden) {
    try {
      if (Object.keys(state.words.refusals).length === 0) state.words = await ask("/page/words.json");
      await look();
    } catch (error) {
      state.failure = error.name === "TimeoutError" ? "no answer in time" : error.message;
    }
    draw();
  }
  setTimeout(turn, LOOK_EVERY);
}

/** The arrow keys go through the jobs; Tab does as well. */
function onKey(event) {
  const step = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
  const links = [...$("jobs").querySelectorAll("tbody a")];
  const here = links.indexOf(document.activeElement);
  if (step === undefined || here < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  links[Math.min(links.length - 1, Math.max(0, here + step))].focus();
}

/** Another job was chosen: what is known of it is drawn at once. */
async function onChoice() {
  if (state.status === null) return;
  state.selected = choose(state.status.jobs);
  draw();
  try {
    await remember(state.selected);
    draw();
  } catch {
    // The next look says why.
  }
}

$("jobs").addEventListener("keydown", onKey);
addEventListener("hashchange", onChoice);
$("skip").addEventListener("click", (event) => {
  // Not by the address: that names the job.
  event.preventDefault();
  $("job").focus();
  $("job").scrollIntoView();
});
turn();
