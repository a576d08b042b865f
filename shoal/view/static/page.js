// The page of `shoal view`: it reads /api/v1 and draws it.
// It treats the contents of a store as text, never as markup.
"use strict";

const CHUNK = 100; // rounds in one request
const SHOWN = 100; // rows of a table before "Show all"
const SHARE = 20; // the server spends at most one part in this many of its time on this page
const RETRY_MS = 5000;
const LOST = 0; // status of a request that got no answer
const VIEWS = {
  fleet: "Fleet",
  run: "Run",
  coverage: "Coverage",
  models: "Models",
  methods: "Methods",
  artifacts: "Artifacts",
  rollouts: "Rollouts",
};
const ALONE = ["fleet", "methods", "rollouts"]; // views without a run
const LOWER = ["loss", "mae", "rmse", "perplexity"];
const state = {
  lines: "all",
  menus: new Set(),
  rounds: new Map(),
  charts: new Map(),
  all: new Set(),
  filter: "",
  of: null,
  files: new Map(),
  ended: new Map(),
  drawn: new Set(),
};
const at = (id) => document.getElementById(id);

// ---- creating elements: strings become text nodes and are never parsed

function el(tag, given = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(
    ...inside.flat().filter((part) => part !== null && part !== undefined && part !== ""),
  );
  return made;
}

// `words` with `code` in backticks.
const sentence = (words) =>
  words.split("`").map((part, at) => (at % 2 ? el("code", {}, part) : part));
const link = (more, text) =>
  el("a", { href: `#${new URLSearchParams({ ...place(), ...more })}` }, text);
const number = (value, digits = 4) =>
  value === null || value === undefined ? "-" : value.toFixed(digits);
const capital = (words) => words.replace(/^./, (letter) => letter.toUpperCase());
const clock = (at) => (at ? new Date(at * 1000).toLocaleString("sv") : "-");
// Tables of recent times are narrow: the day is left out of today's, and shown on hover.
const when = (at) => {
  const [day, time] = clock(at).split(" ");
  return day === clock(state.status.as_of).split(" ")[0]
    ? el("span", { title: clock(at) }, time)
    : clock(at);
};

function size(count) {
  if (count === null || count === undefined) return "-";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 1000 || unit === "GB") return `${+count.toPrecision(3)} ${unit}`;
    count /= 1000;
  }
}

function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  const hours = Math.floor(minutes / 60);
  return minutes < 60
    ? `${minutes} min ${Math.floor(value % 60)} s`
    : hours < 48
      ? `${hours} h ${minutes % 60} min`
      : `${Math.floor(hours / 24)} days`;
}

function table(id, caption, columns, rows, tall = false) {
  if (!rows.length) return el("p", { class: "note" }, `${caption}: nothing yet.`);
  const shown = state.all.has(id) ? rows : rows.slice(0, SHOWN);
  const cells = shown.map((row) =>
    columns.map(([, value, kind], at) =>
      el(at ? "td" : "th", { scope: at ? null : "row", class: kind }, value(row)),
    ),
  );
  // Columns without any value are hidden.
  const used = columns.map(
    (_, at) =>
      at === 0 ||
      cells.some(
        (row) => row[at].childElementCount || !["", "-"].includes(row[at].textContent.trim()),
      ),
  );
  const head = el(
    "tr",
    {},
    columns
      .filter((_, at) => used[at])
      .map(([name, , kind]) => el("th", { scope: "col", class: kind }, name)),
  );
  const body = cells.map((row) =>
    el(
      "tr",
      {},
      row.filter((_, at) => used[at]),
    ),
  );
  const more =
    rows.length > shown.length
      ? el(
          "p",
          {},
          el(
            "button",
            {
              type: "button",
              onclick: () => {
                state.all.add(id);
                draw(true);
              },
            },
            `Show all ${rows.length}`,
          ),
        )
      : null;
  return el(
    "div",
    {},
    el(
      "div",
      {
        class: `scroll ${tall ? "tall" : ""}`,
        tabindex: "0",
        role: "region",
        "aria-label": caption,
      },
      el(
        "table",
        {},
        el("caption", {}, el("span", {}, caption)),
        el("thead", {}, head),
        el("tbody", {}, body),
      ),
    ),
    more,
  );
}

// A part of the view; it is redrawn only when its data has changed.
function part(id, title, shown, build, about = "") {
  let made = at(id);
  if (!made)
    at("content").append(
      (made = el("section", { id, "aria-labelledby": title ? `${id}-title` : null })),
    );
  const now = JSON.stringify(shown);
  if (made.shown === now) return;
  made.shown = now;
  const focused = made.contains(document.activeElement) ? document.activeElement.id : "";
  const heading = title ? [el("h2", { id: `${id}-title` }, title)] : [];
  made.replaceChildren(
    ...heading,
    ...(about ? [el("p", { class: "note" }, sentence(about))] : []),
    ...[build()].flat(),
  );
  if (focused) at(focused)?.focus();
}

// ---- charts, each with its numbers as text

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chart(id, title, x, lines, unit = (value) => number(value), across = "round") {
  const used = lines.filter(([, values]) => values.some((value) => value !== null));
  const last = used.map(([name, values]) => {
    const known = values.filter((value) => value !== null);
    const ends = `${unit(known[0])} at first, ${unit(known.at(-1))} at last`;
    const range = `between ${unit(Math.min(...known))} and ${unit(Math.max(...known))}`;
    return `${name}: ${ends}, ${range}`;
  });
  let known = state.charts.get(id);
  const along = (value) =>
    value === null || value === undefined
      ? "--"
      : across.startsWith("bytes")
        ? size(value)
        : across === "round"
          ? String(value)
          : seconds(value);
  const key = JSON.stringify([
    title,
    used.map(([name]) => name),
    matchMedia("(prefers-color-scheme: dark)").matches,
  ]);
  if (!known || known.key !== key) {
    const box = el("div", { class: "plot", role: "img" });
    const text = el("p", { class: "note" });
    const figure = el(
      "figure",
      {},
      el("figcaption", {}, title),
      box,
      el("details", {}, el("summary", {}, "In words"), text),
    );
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line") },
    };
    if (known) known.figure.replaceWith(figure);
    known = { key, figure, box, text, plot: null };
    known.make = () =>
      new uPlot(
        {
          legend: { show: used.length > 1 },
          width: Math.max(240, box.clientWidth),
          height: 220,
          scales: { x: { time: false } },
          cursor: { points: { size: 6 } },
          axes: [
            {
              ...axis,
              ...(across === "round"
                ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }
                : { space: 70, values: (_, ticks) => ticks.map(along) }),
            },
            {
              ...axis,
              size: 62,
              values: (_, ticks) =>
                ticks.map((tick) => (unit === size ? size(tick) : String(+tick.toPrecision(6)))),
            },
          ],
          series: [
            { label: across, value: (_, value) => along(value) },
            ...used.map(([name, , flat], at) => ({
              label: name,
              stroke: colour(`--s${(at % 6) + 1}`),
              width: at ? 1.5 : 2.5,
              spanGaps: true,
              points: { show: !flat && x.length < 40, size: 4 },
              value: (_, value) => unit(value),
              dash: flat ? [3, 4] : at > 5 ? [6, 4] : [],
            })),
          ],
        },
        known.data,
        box,
      );
    state.charts.set(id, known);
  }
  const extent = across === "round" ? `over ${x.length} rounds` : `up to ${along(x.at(-1) ?? 0)}`;
  const inWords = last.join(". ") || "Nothing yet.";
  known.box.setAttribute("aria-label", `${title}, ${extent}. ${inWords}`);
  known.text.textContent = inWords;
  known.data = [x, ...used.map(([, values]) => values)];
  if (known.plot) known.plot.setData(known.data);
  else
    requestAnimationFrame(() => {
      if (!known.plot && known.box.isConnected && x.length) known.plot = known.make();
    });
  return known.figure;
}

function heat(title, found) {
  const most = Math.max(1, ...found.axes.flatMap((axis) => axis.counts));
  const units = found.axes.reduce((sum, axis) => sum + axis.size, 0);
  const covered = found.axes.reduce((sum, axis) => sum + axis.covered, 0);
  const share = (have, of) => `${Math.floor((100 * have) / of)} %`;
  const words = found.axes.map((axis) => `${label(axis)}: ${axis.covered} of ${axis.size} units`);
  const canvas = el("canvas", {
    role: "img",
    "aria-label": `${title}: ${covered} of ${units} coordinates covered. ${words.join(". ")}`,
  });
  const rows = el("div", { class: "plot" }, canvas);
  requestAnimationFrame(() => paint(canvas, rows.clientWidth, found.axes, most));
  return el(
    "figure",
    {},
    el(
      "figcaption",
      {},
      title,
      " ",
      el(
        "span",
        {},
        `${share(covered, units)} of ${units} coordinates covered by ${found.updates} updates`,
      ),
    ),
    rows,
    el(
      "details",
      {},
      el("summary", {}, "As a table"),
      table(
        "",
        `Covered units, ${title}`,
        [
          ["block", (axis) => axis.block],
          ["axis", (axis) => axis.axis || "whole"],
          ["units", (axis) => axis.size, "n"],
          ["covered", (axis) => axis.covered, "n"],
          [
            "updates a unit, least to most",
            (axis) =>
              `${number(Math.min(...axis.counts), 1)} to ${number(Math.max(...axis.counts), 1)}`,
            "n",
          ],
        ],
        found.axes,
      ),
    ),
  );
}

const label = (axis) => (axis.axis ? `${axis.block} / ${axis.axis}` : axis.block);

function paint(canvas, width, axes, most) {
  const ratio = devicePixelRatio || 1;
  const left = Math.min(150, width * 0.36);
  const high = 15;
  const gap = 11;
  const height = axes.length * (high + gap);
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const heat = colour("--heat");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  axes.forEach((axis, row) => {
    const top = row * (high + gap) + 2;
    const step = (width - left) / axis.counts.length;
    pen.fillStyle = colour("--soft");
    pen.fillText(label(axis), 0, top + high / 2, left - 8);
    axis.counts.forEach((count, cell) => {
      const x = left + cell * step;
      const wide = Math.max(1, step - (step > 4 ? 1 : 0));
      pen.fillStyle = count ? `rgba(${heat}, ${0.18 + (0.82 * count) / most})` : colour("--none");
      pen.fillRect(x, top, wide, high);
      if (!count && step > 3) {
        // units that no device trains are struck out, not only pale
        pen.strokeStyle = colour("--line");
        pen.beginPath();
        pen.moveTo(x, top + high);
        pen.lineTo(x + wide, top);
        pen.stroke();
      }
      if (axis.held[cell]) {
        pen.fillStyle = colour("--now");
        pen.globalAlpha = 0.35 + 0.65 * axis.held[cell];
        pen.fillRect(x, top + high + 2, Math.max(1, step), 3.5);
        pen.globalAlpha = 1;
      }
    });
  });
}

// A quoted word of a command to copy: the store is untrusted, and a shell must read one word.
const word = (text) =>
  /^[\w@%+=:,.\/-]+$/.test(text) ? text : `'${String(text).replaceAll("'", `'"'"'`)}'`;
// The displayed name of a run: its name or method, and its start; its id distinguishes runs of one
// minute.
const titleOf = (view) => view.run.name ?? view.strategy;
const changing = (runs) => runs.map(({ run }) => [run.id, run.name, run.status]);
const named = (view) => `${titleOf(view)}, ${clock(view.run.created_at).slice(0, 16)}`;

function exporting(version) {
  const store = word(state.status.run.config.store);
  const run = word(version.run);
  return `shoal export-weights --store ${store} --run ${run} --version ${version.number}`;
}

// ---- actions of operators, each after a confirmation

const acts = () => Boolean(state.access?.acts);

function verb(name, text, question, more = {}, path = of(`/actions/${name}`)) {
  return el(
    "button",
    {
      type: "button",
      onclick: async () => {
        if (!confirm(question)) return;
        const answer = await fetch(`api/v1/${path}?${new URLSearchParams(more)}`, {
          method: "POST",
        }).catch(() => null);
        const found = (await answer?.json().catch(() => null)) ?? {
          detail: NO_ANSWER,
        };
        at("said").className = answer?.ok ? "good" : "error";
        at("said").textContent = answer?.ok ? `Done: ${found.done}.` : `Not done: ${found.detail}`;
        if (answer?.status === 401 || answer?.status === 403) login();
        else {
          state.busy = false;
          refresh();
        } // show the effect at once
      },
    },
    text,
  );
}

function steering(run) {
  const can = {
    running: [
      ["pause", "Pause", "Pause the run after its current round?"],
      ["stop", "Stop", "End the run after its current round? It cannot be resumed afterwards."],
    ],
    paused: [
      ["resume", "Resume", "Resume the run?"],
      ["stop", "Stop", "End the run? It cannot be resumed afterwards."],
    ],
  }[run.status] ?? [["start", "Start again", "Start a new run with the settings of this one?"]];
  if (acts() && state.access.steers)
    part("steering", "", run.status, () =>
      el(
        "p",
        { class: "row" },
        can.map((given) => verb(...given)),
      ),
    );
  else at("steering")?.remove();
}

// Whether a device is connected, as a dot and as a word for screen readers.
function presence({ device }) {
  const word =
    device.state === "simulated"
      ? "simulated"
      : state.status.served === false
        ? "unknown"
        : device.online
          ? device.state
          : "offline";
  return el("span", {
    class: `dot ${device.online && state.status.served !== false ? "on" : ""}`,
    role: "img",
    title: word,
    "aria-label": word,
  });
}

const degrees = (profile) =>
  profile && profile.temperature_celsius !== null
    ? `${number(profile.temperature_celsius, 0)} °C`
    : "-";
const freeMemory = (profile) =>
  profile ? `${size(profile.free_ram_bytes)} of ${size(profile.ram_bytes)}` : "-";

const releasing = (view) =>
  acts() && view.reason.startsWith("in quarantine")
    ? verb("release", "Release", `Release ${view.device.id} for the next round?`, {
        device: view.device.id,
      })
    : "";

// ---- the views

function fleet() {
  const { status, devices } = state;
  const run = status.run;
  if (run) {
    const sinceWhen = status.served === false ? " when the server stopped" : "";
    const progress = el("progress", {
      max: status.rounds,
      value: status.closed,
      "aria-label": `${status.closed} of ${status.rounds} rounds have ended`,
    });
    part(
      "glance",
      "",
      [
        run,
        status.closed,
        status.rounds,
        status.seconds_left,
        status.served,
        status.online,
        devices.length,
      ],
      () => [
        progress,
        tiles({
          run:
            status.served === false && !run.ended_at
              ? `${run.status}, but no server is using its store`
              : run.status,
          rounds: `${status.closed} of ${status.rounds}`,
          ...(status.seconds_left === null
            ? {}
            : { "time left": `about ${seconds(status.seconds_left)}` }),
          "newest model": status.evaluation
            ? status.evaluation.accuracy !== null
              ? `accuracy ${number(status.evaluation.accuracy)}`
              : `loss ${number(status.evaluation.loss)}`
            : "not evaluated",
          "devices online": devices.some((view) => view.device.state === "simulated")
            ? `${devices.length} simulated`
            : `${status.online} of ${status.devices}${sinceWhen}`,
          "on the wire": size(run.wire_bytes),
          ...(status.epsilon === null ? {} : { epsilon: number(status.epsilon) }),
        }),
      ],
    );
    steering(run);
    if (status.insecure)
      part("insecure", "", 1, () =>
        el(
          "p",
          { class: "error" },
          "Messages are not signed: anyone who reaches the broker can run graphs on the boards.",
        ),
      );
    const found = state.advice;
    part("next", "What to do next", found, () =>
      !found
        ? el("p", { class: "note" }, "Looking.")
        : found.length
          ? el(
              "ul",
              { class: "next" },
              found.map((item) =>
                el(
                  "li",
                  { class: item.kind },
                  el("p", {}, item.title),
                  el("p", {}, item.evidence),
                  el("p", {}, sentence(item.remedy)),
                ),
              ),
            )
          : el("p", { class: "note" }, "Nothing to do: no rule found a problem."),
    );
  } else
    part("none", "", 1, () =>
      el(
        "p",
        { class: "note" },
        sentence("No run yet. Start one with `shoal run`; this page then shows it."),
      ),
    );
  const wanted = devices.filter(
    (view) =>
      !state.filter ||
      `${view.device.id} ${view.tier} ${view.reason}`.toLowerCase().includes(state.filter),
  );
  const waits = (view) => view.reason === "not drawn";
  const rank = (view) => (view.reason ? (waits(view) ? 1 : 2) : 0);
  const rows = wanted.sort((a, b) => rank(b) - rank(a) || (a.device.id < b.device.id ? -1 : 1));
  part("devices", "Devices", [rows, state.all.has("devices"), acts()], () => [
    el(
      "p",
      { class: "row" },
      el(
        "label",
        {},
        "Find ",
        el("input", {
          id: "find",
          type: "search",
          value: state.filter,
          oninput: (event) => {
            state.filter = event.target.value.toLowerCase();
            draw();
            const box = at("find");
            box.setSelectionRange(box.value.length, box.value.length);
          },
        }),
      ),
    ),
    table(
      "devices",
      "All devices; devices that do not train come first",
      [
        [
          "device",
          (view) => [
            presence(view),
            " ",
            link({ view: "device", device: view.device.id }, view.device.id),
          ],
        ],
        ["last seen", (view) => when(view.device.last_seen_at), "id"],
        [
          "trains",
          (view) =>
            el(
              "span",
              { class: waits(view) ? "" : view.reason ? "warn" : "good" },
              waits(view) ? "waits" : view.reason ? "no" : "yes",
            ),
        ],
        ["tier", (view) => view.tier ?? "-", "id"],
        ["reason", (view) => view.reason || "-", "long"],
        ["what to do", (view) => [...sentence(view.remedy || "-"), " ", releasing(view)], "long"],
        ["temperature", (view) => degrees(view.device.profile), "n"],
        ["memory free", (view) => freeMemory(view.device.profile), "n"],
        ["merged", (view) => view.merged, "n"],
        ["missed", (view) => view.missed, "n"],
        ["refused", (view) => view.refused, "n"],
        ["samples", (view) => view.examples ?? "-", "n"],
        ["own accuracy", (view) => number(view.evaluation?.accuracy), "n"],
        ...(rows.some((view) => view.shared_evaluation)
          ? [["without private", (view) => number(view.shared_evaluation?.accuracy), "n"]]
          : []),
        ["training", (view) => seconds(view.train_seconds), "n"],
        ["memory taken", (view) => size(view.resident_bytes), "n"],
      ],
      rows,
      true,
    ),
  ]);
  journal();
}

function tiles(pairs) {
  return el(
    "dl",
    { class: "tiles" },
    Object.entries(pairs).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, String(value))),
    ),
  );
}

// Filters of the log: their names, and the kinds of lines that they request from the API.
const ROUTINE = ["device-accepted", "device-progressed", "round-started", "update-received"];
const OPERATED = ["asked", "dismissed", "promoted", "returned", "rolled-back", "run-steered"];
const LINES = {
  all: { text: "all", query: {}, fits: () => true },
  notable: {
    text: "all but updates and offers",
    query: { without: ROUTINE },
    fits: (line) => !ROUTINE.includes(line.kind),
  },
  operated: {
    text: "actions of operators",
    query: { kind: OPERATED },
    fits: (line) => OPERATED.includes(line.kind),
  },
};

// The newest lines of the log that pass the filter; older lines are requested.
async function readLog(run, device = "") {
  const query = new URLSearchParams({ last: 200, device, ...(run ? { run: run.id } : {}) });
  for (const [name, values] of Object.entries(LINES[state.lines].query))
    for (const value of values) query.append(name, value);
  return api(`log?${query}`);
}

async function chooseLines(event) {
  state.lines = event.target.value;
  state.log = await readLog(state.status.run);
  await detail();
  draw();
}

function journal(device = null) {
  // The lines of a device were requested separately; newer ones are in the common list.
  const before = device ? state.detail.lines : [];
  const newest = before.at(-1)?.id ?? 0;
  const since = state.log.filter(
    (line) =>
      (!line.run || line.run === state.status.run?.id) &&
      (!device || (line.device === device && line.id > newest)),
  );
  const lines = [...before, ...since].slice(-60).reverse();
  const choice = () =>
    el(
      "p",
      { class: "row" },
      el(
        "label",
        {},
        "Show ",
        el(
          "select",
          { id: "lines", onchange: chooseLines },
          Object.entries(LINES).map(([name, { text }]) =>
            el("option", { value: name, selected: name === state.lines }, text),
          ),
        ),
      ),
    );
  part("log", "Log", [lines, state.lines], () => [
    choice(),
    table(
      "log",
      "Newest lines first",
      [
        ["when", (line) => when(line.at), "id"],
        ["what", (line) => line.kind, "id"],
        ["round", (line) => line.round ?? "-", "n"],
        ["device", (line) => line.device ?? "-"],
        ["detail", (line) => line.detail, "long"],
      ],
      lines,
      true,
    ),
  ]);
}

const ended = (view) => view.round.ended_at !== null;

function run() {
  const { status } = state;
  const record = status.run;
  const known = [...state.rounds.values()].sort((a, b) => a.round.number - b.round.number);
  const rounds = known.filter(ended); // a round in progress would distort every curve
  const x = rounds.map((view) => view.round.number);
  const judged = (read) =>
    rounds.map((view) => (view.round.evaluation ? (read(view.round.evaluation) ?? null) : null));
  const tiers = [
    ...new Set(rounds.flatMap((view) => Object.keys(view.round.evaluation?.tiers ?? {}))),
  ];
  const metrics = [
    ...new Set(
      rounds.flatMap((view) => view.round.evaluation?.metrics.map((item) => item.name) ?? []),
    ),
  ];
  steering(record);
  part("curves", "Curves", 1, () => el("div", { class: "charts" }));
  const box = at("curves").querySelector(".charts");
  const show = (...given) => {
    const made = chart(...given);
    if (made.parentNode !== box) box.append(made);
  };
  show("accuracy", "Accuracy of the merged model", x, [
    ["whole model", judged((found) => found.accuracy)],
    ...tiers.map((tier) => [tier, judged((found) => found.tiers[tier]?.accuracy)]),
    ["mean on devices", rounds.map((view) => view.device_accuracy)],
  ]);
  show("loss", "Loss of the merged model", x, [
    ["whole model", judged((found) => found.loss)],
    ...tiers.map((tier) => [tier, judged((found) => found.tiers[tier]?.loss)]),
  ]);
  for (const name of metrics)
    show(`metric-${name}`, name, x, [
      [name, judged((found) => found.metrics.find((item) => item.name === name)?.value)],
    ]);
  show(
    "bytes",
    "Bytes of a round",
    x,
    [
      ["weights sent", rounds.map((view) => view.sent_bytes)],
      ["updates received", rounds.map((view) => view.received_bytes)],
    ],
    size,
  );
  if (rounds.some((view) => view.epsilon !== null))
    show("privacy", "Privacy budget spent, epsilon", x, [
      ["device selected most often", rounds.map((view) => view.epsilon)],
    ]);
  show(
    "time",
    "Seconds of a round",
    x,
    [["from offers to end", rounds.map((view) => view.seconds)]],
    (value) => seconds(value),
  );
  part("numbers", "Bytes, privacy and refusals", [record, status.refusals, status.epsilon], () =>
    tiles({
      "on the wire": size(record.wire_bytes),
      payload: size(record.payload_bytes),
      "overhead of the protocol":
        record.wire_bytes && record.payload_bytes
          ? `${number(100 * (record.wire_bytes / record.payload_bytes - 1), 1)} %`
          : "-",
      "privacy budget spent":
        status.epsilon === null ? "no noise is added" : `epsilon ${number(status.epsilon)}`,
      refused:
        Object.entries(status.refusals)
          .map(([why, times]) => `${times} ${why}`)
          .join(", ") || "nothing",
    }),
  );
  const listed = [...known].reverse();
  const reading = status.round && !listed.length; // the rounds arrive after the status
  part("rounds", "Rounds", [listed, state.all.has("rounds")], () =>
    reading
      ? el("p", { class: "note" }, "Reading the rounds.")
      : table(
          "rounds",
          "Newest first; click a number to open the round",
          [
            [
              "round",
              ({ round: { number: at } }) => link({ view: "round", round: at }, String(at)),
              "n",
            ],
            ["state", (view) => view.round.state],
            [
              "updates",
              (view) =>
                Object.entries(view.phases)
                  .map(([phase, times]) => `${times} ${phase}`)
                  .join(", "),
            ],
            ["accuracy", (view) => number(view.round.evaluation?.accuracy), "n"],
            ["loss", (view) => number(view.round.evaluation?.loss), "n"],
            ["time", (view) => seconds(view.seconds), "n"],
            [
              "left out",
              (view) =>
                view.round.left_out
                  ? Object.keys(view.round.left_out.reasons).length + view.round.left_out.more
                  : "-",
              "n",
            ],
            ["note", (view) => view.round.reason ?? view.round.note ?? "", "long"],
          ],
          listed,
          true,
        ),
  );
}

function round() {
  const { tasks, explained } = state.detail;
  const end = Math.max(
    0.001,
    ...explained.map((row) => row.answered_seconds ?? row.left_seconds ?? row.collect_seconds ?? 0),
  );
  const measured = new Map(tasks.map((task) => [task.device, task.metrics]));
  const bar = (row) => {
    if (row.outcome === "not asked") return "-";
    const told = measured.get(row.device);
    const stop = row.answered_seconds ?? row.left_seconds ?? end;
    const made = el("span", { class: "bar" });
    let from = 0;
    for (const [kind, took] of [
      ["fetch", told?.fetch_seconds ?? 0],
      ["train", told?.train_seconds ?? 0],
      ["rest", Infinity],
    ]) {
      const to = Math.min(stop, from + took);
      const piece = el("i", { class: kind });
      piece.style.left = `${(100 * from) / end}%`;
      piece.style.width = `${(100 * (to - from)) / end}%`;
      made.append(piece);
      from = to;
    }
    const parts = [
      [told?.fetch_seconds, "fetching"],
      [told?.train_seconds, "training"],
    ]
      .filter(([took]) => took !== null && took !== undefined)
      .map(([took, text]) => `${seconds(took)} ${text}`);
    return [
      made,
      capital(
        [
          ...parts,
          row.answered_seconds === null
            ? row.left_seconds === null
              ? "no update"
              : `offline after ${seconds(row.left_seconds)}`
            : `answered after ${seconds(row.answered_seconds)}`,
        ].join(", "),
      ),
    ];
  };
  part("round", "", [explained], () => [
    el(
      "p",
      { class: "row" },
      ...[
        ["fetch", "fetching"],
        ["train", "training"],
        ["rest", "sending, or waiting"],
      ].map(([kind, text]) =>
        el("span", { class: "legend" }, el("span", { class: `swatch ${kind}` }), text),
      ),
    ),
    table(
      "round",
      `Selected devices, their answers, and why others were left out; bars end at ${seconds(end)}`,
      [
        ["device", (row) => link({ view: "device", device: row.device }, row.device)],
        [
          "outcome",
          (row) =>
            el(
              "span",
              {
                class:
                  row.outcome === "merged" ? "good" : row.outcome === "not asked" ? "" : "warn",
              },
              row.outcome,
            ),
          "id",
        ],
        ["tier", (row) => row.tier ?? "-", "id"],
        ["time", bar],
        ["why", (row) => row.why || "-", "long"],
        ["norm", (row) => number(row.norm), "n"],
        ["samples", (row) => row.samples ?? "-", "n"],
      ],
      explained,
      true,
    ),
  ]);
}

function largestTier(profile) {
  const depth = profile.max_depth === null ? "" : `, depth ${profile.max_depth}`;
  return `width ${profile.max_width}${depth}`;
}

function agentState({ state: known, online }) {
  if (known === "simulated") return known;
  if (state.status.served === false) return `unknown, was ${known} when the server stopped`;
  return online ? known : `offline, was ${known}`;
}

function device() {
  const name = place().device;
  const view = state.devices.find((found) => found.device.id === name);
  const tasks = state.detail.tasks;
  part("device", "", [view, acts(), state.status.served], () => [
    el(
      "p",
      { class: view.reason ? "" : "good" },
      view.reason === "not drawn"
        ? "Waiting: it was not drawn in the newest round."
        : view.reason
          ? `Does not train: ${view.reason}. `
          : "Takes part.",
      ...sentence(view.reason === "not drawn" ? "" : capital(view.remedy)),
      " ",
      releasing(view),
    ),
    ...(view.device.profile?.findings ?? []).map((finding) =>
      el("p", { class: "bad" }, `Its data looks wrong: ${finding}.`),
    ),
    tiles({
      tier: view.tier ?? "-",
      merged: view.merged,
      missed: view.missed,
      refused: view.refused,
      samples: view.examples ?? "-",
      memory: size(view.resident_bytes),
      "last seen": clock(view.device.last_seen_at),
      "agent": agentState(view.device),
    }),
  ]);
  const said = view.device.profile;
  part("readings", "Readings", said, () =>
    !said
      ? el("p", { class: "note" }, "The device has not sent a description.")
      : tiles({
          board: `${said.arch}, ${said.cores} core${said.cores > 1 ? "s" : ""}`,
          system: said.system,
          "memory free": `${size(said.free_ram_bytes)} of ${size(said.ram_bytes)}`,
          link:
            said.link_bytes_per_second === null
              ? "not measured"
              : `${size(said.link_bytes_per_second)} a second`,
          "a training step":
            said.step_seconds === null
              ? "not measured"
              : `${number(said.step_seconds * 1000, 1)} ms`,
          temperature:
            said.temperature_celsius === null
              ? "unknown"
              : `${number(said.temperature_celsius, 1)} °C`,
          power: said.on_battery === null ? "unknown" : said.on_battery ? "battery" : "mains",
          "may train up to": largestTier(said),
          Shoal: said.runtime_version,
          Python: said.python,
          "trains with":
            Object.entries(said.backends)
              .map(([name, version]) => `${name} ${version}`)
              .join(", ") || "nothing",
          release: said.release?.split(" ").slice(0, 2).join(" ") ?? "accepts none",
          ...(said.lowered ? { "reduced tier": said.lowered } : {}),
        }),
  );
  timeline(tasks);
  part("learns", "", 1, () => el("div", { class: "charts" }));
  const box = at("learns").querySelector(".charts");
  const x = tasks.map((task) => task.round);
  const told = (read) => tasks.map((task) => (task.metrics ? (read(task.metrics) ?? null) : null));
  for (const made of [
    chart("own-loss", "Training loss", x, [["last epoch", told((found) => found.train_loss)]]),
    chart(
      "own-time",
      "Seconds of its rounds",
      x,
      [
        ["training", told((found) => found.train_seconds)],
        ["fetching", told((found) => found.fetch_seconds)],
      ],
      (value) => seconds(value),
    ),
  ])
    if (made.parentNode !== box) box.append(made);
  part("tasks", "Its rounds", [tasks, state.all.has("tasks")], () =>
    table(
      "tasks",
      "Newest first",
      [
        ["round", (task) => link({ view: "round", round: task.round }, String(task.round)), "n"],
        ["outcome", (task) => task.phase],
        ["tier", (task) => task.tier, "id"],
        ["why", (task) => task.detail ?? "-", "long"],
        ["loss", (task) => number(task.metrics?.train_loss), "n"],
        ["own accuracy", (task) => number(task.metrics?.evaluation?.accuracy), "n"],
        ["fetching", (task) => seconds(task.metrics?.fetch_seconds), "n"],
        ["training", (task) => seconds(task.metrics?.train_seconds), "n"],
        ["update", (task) => size(task.update_size), "n"],
      ],
      [...tasks].reverse(),
      true,
    ),
  );
  journal(name);
}

// Tasks of the rounds that had ended when the status was read: the newest task of each round, so
// that sums add up although the tasks were read later. A round that ends together with the next one
// counts with it.
function counted(tasks) {
  const { round } = state.status;
  const newest = tasks.at(-1)?.round ?? 0;
  const last = !round ? 0 : round.ended_at !== null ? round.number : round.number - 1;
  const of = new Map(
    tasks.filter((task) => task.round <= Math.max(last, 0)).map((task) => [task.round, task]),
  );
  const phases = new Map();
  for (const { phase } of of.values()) phases.set(phase, (phases.get(phase) ?? 0) + 1);
  const counts = [...phases].map(([phase, times]) => `${times} ${phase}`);
  counts.push(`${last - of.size} not asked`);
  const inProgress = newest > last ? `; round ${newest} is in progress` : "";
  const words = `Of ${last} ended rounds: ${counts.join(", ")}${inProgress}.`;
  return { last, of, words };
}

// The outcome of the device in each round of the run, one cell each; in a long run, a cell covers
// several rounds.
function timeline(tasks) {
  const { last, of: inEnded, words } = counted(tasks);
  const per = Math.max(1, Math.ceil(last / 120));
  const roundsOf = (cell) => {
    const first = `Round ${cell * per + 1}`;
    return per > 1 ? `${first} to ${Math.min(last, (cell + 1) * per)}` : first;
  };
  const cells = new Map();
  const worst = (phase) =>
    phase === "merged" ? "good" : ["missed", "refused"].includes(phase) ? "bad" : "under";
  const order = ["good", "under", "bad"];
  for (const task of inEnded.values()) {
    const cell = Math.floor((task.round - 1) / per);
    const kind = worst(task.phase);
    if (order.indexOf(kind) > order.indexOf(cells.get(cell))) cells.set(cell, kind);
  }
  part("timeline", "Ended rounds, oldest first", [words, last], () => [
    el(
      "p",
      { class: "row" },
      ...[
        ["good", "merged"],
        ["under", "at work"],
        ["bad", "missed or refused"],
        ["none", "not asked"],
      ].map(([kind, text]) =>
        el("span", { class: "legend" }, el("span", { class: `swatch ${kind}` }), text),
      ),
    ),
    el(
      "p",
      { class: "states", role: "img", "aria-label": words },
      Array.from({ length: Math.ceil(last / per) }, (_, cell) =>
        el("i", {
          class: cells.get(cell) ?? "none",
          title: roundsOf(cell),
        }),
      ),
    ),
    el(
      "p",
      { class: "note" },
      per > 1 ? `${words} A cell covers ${per} rounds and shows the worst outcome.` : words,
    ),
  ]);
}

function covered() {
  const { maps } = state.detail;
  const whole = maps[0][1];
  part("steer", "", [whole.rounds, place().device], () => [
    el(
      "p",
      { class: "note" },
      "Each row is an axis of the model in one block, from the first unit at the left to the " +
        "last at the right. The coverage depends on the method: with fixed windows only large " +
        "boards train the right side, while rolling windows reach every unit in " +
        "time.",
    ),
    el(
      "p",
      { class: "row" },
      el("span", { class: "legend" }, el("span", { class: "swatch none" }), "no update yet"),
      el(
        "span",
        { class: "legend" },
        el("span", { class: "swatch some" }),
        "few to most merged updates",
      ),
      el(
        "span",
        { class: "legend" },
        el("span", { class: "swatch now" }),
        "trained in the newest round shown",
      ),
    ),
    el(
      "p",
      { class: "row" },
      el("button", { type: "button", id: "play", onclick: play }, "Play"),
      el(
        "label",
        {},
        "Up to round ",
        el("span", { id: "upto" }, String(whole.round)),
        " ",
        el("input", {
          id: "slide",
          type: "range",
          min: Math.min(1, whole.rounds),
          max: whole.rounds,
          value: whole.round,
          oninput: (event) => look(+event.target.value),
        }),
      ),
      el(
        "label",
        {},
        "Device ",
        el(
          "select",
          {
            id: "who",
            onchange: (event) => {
              state.all.delete("who");
              go({ device: event.target.value });
            },
          },
          ["", ...whole.devices].map((name) =>
            el(
              "option",
              { value: name, selected: name === (place().device ?? "") },
              name || "none",
            ),
          ),
        ),
      ),
    ),
  ]);
  part("maps", "", maps, () =>
    el(
      "div",
      { class: "maps" },
      maps.map(([title, found]) => heat(title, found)),
    ),
  );
}

async function look(upto) {
  at("upto").textContent = upto;
  state.upto = upto;
  if (state.looking) return; // the newest request is handled after this one
  state.looking = true;
  while (state.upto !== null) {
    const wish = state.upto;
    state.upto = null;
    state.round = wish;
    await detail();
    if (place().view === "coverage") draw();
  }
  state.looking = false;
}

async function play() {
  const slide = at("slide");
  if (state.playing) {
    state.playing = false;
    return;
  }
  state.playing = true;
  at("play").textContent = "Stop";
  const step = Math.max(1, Math.ceil(slide.max / 100));
  for (
    let upto = +slide.value >= +slide.max ? 1 : +slide.value;
    state.playing && place().view === "coverage" && upto <= +slide.max;
    upto += step
  ) {
    at("slide").value = upto;
    await look(upto);
    await new Promise((done) => setTimeout(done, 120));
  }
  state.playing = false;
  if (at("play")) at("play").textContent = "Play";
}

const FORMATS = { onnx: "ONNX", torch: "torch", safetensors: "safetensors" };

// A button that requests a file: the server answers with a message if it cannot write the file, and
// a link would open that as a page.
function taking(format, text, version) {
  const name = `model-${version.number}.${format === "torch" ? "pt" : format}`;
  return el(
    "button",
    {
      type: "button",
      "aria-label": `Download as ${text}, version ${version.number}`,
      onclick: async () => {
        const answer = await fetch(
          `api/v1/${of(`/versions/${version.number}/weights?format=${format}`)}`,
        ).catch(() => null);
        at("said").className = answer?.ok ? "good" : "error";
        if (!answer?.ok) {
          const found = await answer?.json().catch(() => null);
          at("said").textContent = `Not written: ${found?.detail ?? "the server does not answer"}`;
          return;
        }
        const held = URL.createObjectURL(await answer.blob());
        el("a", { href: held, download: name }).click();
        setTimeout(() => URL.revokeObjectURL(held), 60000);
        const loading = JSON.parse(
          decodeURIComponent(answer.headers.get("Shoal-Loading") ?? "%7B%7D"),
        );
        at("said").replaceChildren(
          `Written: ${name}. ${capital(loading.note ?? "")}`,
          ...(loading.lines?.length ? [el("pre", {}, loading.lines.join("\n"))] : []),
        );
      },
    },
    `Download as ${text}`,
  );
}

function models() {
  const owns = new Map([...state.rounds.values()].map((view) => [view.round.number, view]));
  const { versions, runs } = state;
  const tiers = [
    ...new Set(versions.flatMap((view) => Object.keys(view.version.evaluation?.tiers ?? {}))),
  ];
  // A redraw must not close it.
  const keepOpen = (number) => (event) => state.menus[event.target.open ? "add" : "delete"](number);
  const menu = (version) =>
    el(
      "details",
      { class: "menu", open: state.menus.has(version.number), ontoggle: keepOpen(version.number) },
      el("summary", { "aria-label": `Actions of version ${version.number}` }, "Actions"),
      choose("promote", "Promote", version),
      choose("rollback", "Roll back", version),
      ...Object.entries(FORMATS).map(([format, text]) => taking(format, text, version)),
    );
  const counts = runs.find((view) => view.run.id === state.status.run.id)?.versions ?? {};
  const judging = state.status.run.config.evaluation;
  const metric = judging.metric ?? "accuracy, or loss";
  const falls = judging.direction ? judging.direction === "lower" : LOWER.includes(metric);
  const isLowerBetter = judging.metric && falls;
  const newestVersion = versions.at(-1)?.version ?? { run: "RUN", number: 0 };
  const best = versions.reduce(
    (a, b) => (b.score !== null && (!a || b.score >= a.score) ? b : a),
    null,
  );
  const choose = (name, text, { number }) =>
    verb(
      name,
      text,
      {
        promote: `Export version ${number} by default from now on?`,
        rollback: `Start the next round from version ${number}?`,
      }[name],
      { version: number },
    );
  part(
    "versions",
    "Versions",
    [
      versions,
      counts,
      [...owns].map(([number, view]) => [number, view.device_range]),
      state.all.has("versions"),
      acts(),
    ],
    () =>
      table(
        "versions",
        `Newest first; best by ${metric}${isLowerBetter ? ", lower is better" : ""}`,
        [
          ["version", (view) => String(view.version.number), "n"],
          [
            "judged",
            (view) =>
              view === best
                ? el("strong", { class: "good" }, "best")
                : view.score === null
                  ? "no"
                  : "yes",
          ],
          [
            "role",
            (view) =>
              Object.keys(counts)
                .filter((name) => counts[name] === view.version.number)
                .join(", ") || "-",
          ],
          ["made", (view) => when(view.version.created_at), "id"],
          ["accuracy", (view) => number(view.version.evaluation?.accuracy), "n"],
          ["loss", (view) => number(view.version.evaluation?.loss), "n"],
          ...tiers.map((tier) => [
            tier,
            (view) =>
              number(
                view.version.evaluation?.tiers[tier]?.accuracy ??
                  view.version.evaluation?.tiers[tier]?.loss,
              ),
            "n",
          ]),
          ["mean on devices", (view) => number(owns.get(view.version.round)?.device_accuracy), "n"],
          [
            "lowest to highest",
            (view) => {
              const range = owns.get(view.version.round)?.device_range;
              return range ? `${number(range[0])} to ${number(range[1])}` : "-";
            },
            "n",
          ],
          ["size", (view) => size(view.bytes), "n"],
          ["weights", (view) => (!view.kept ? "not kept" : !acts() ? "kept" : menu(view.version))],
        ],
        [...versions].reverse(),
        true,
      ),
    "On devices: accuracy of the devices' sub-models on their held-out samples, if they have " +
    "some. `shoal promote VERSION` exports this version by default, " +
    "`shoal rollback VERSION` starts the next round from it, " +
      `\`${exporting(newestVersion)}\` writes it to a file; operators download it here.`,
  );
  const sets = state.detail.artifacts ?? [];
  const boards = (tier) => state.devices.filter((view) => view.tier === tier);
  const middle = (values) => {
    const known = values
      .filter((value) => value !== null && value !== undefined)
      .sort((a, b) => a - b);
    return known.length ? known[Math.floor(known.length / 2)] : null;
  };
  const newest = versions.filter((view) => view.version.evaluation).at(-1)?.version.evaluation;
  const rows = sets.map((set) => ({
    set,
    own: boards(set.tier)
      .map((view) => view.evaluation?.accuracy)
      .filter((value) => value !== null && value !== undefined),
    there: boards(set.tier),
  }));
  part(
    "tiers",
    "Results by tier",
    [rows, newest],
    () =>
      table(
        "tiers",
        "The newest evaluated version, and its cost on the devices of each tier",
        [
          ["tier", ({ set }) => set.tier, "id"],
          ["devices", ({ there }) => there.length, "n"],
          [
            "evaluated here",
            ({ set }) =>
              number(
                newest?.tiers[set.tier]?.accuracy ??
                  (set === sets[0] && set.width === 1 ? newest?.accuracy : null),
              ),
            "n",
          ],
          [
            "mean on devices",
            ({ own }) => number(own.length ? own.reduce((a, b) => a + b, 0) / own.length : null),
            "n",
          ],
          [
            "lowest to highest",
            ({ own }) =>
              own.length ? `${number(Math.min(...own))} to ${number(Math.max(...own))}` : "-",
            "n",
          ],
          ["MFLOPs, forward", ({ set }) => number(set.flops_per_sample / 1e6, 2), "n"],
          ["peak memory", ({ set }) => size(set.peak_memory_bytes), "n"],
          [
            "a training step",
            ({ there }) => {
              const took = middle(there.map((view) => view.device.profile?.step_seconds));
              return took === null ? "-" : `${number(took * 1000, 1)} ms`;
            },
            "n",
          ],
          [
            "training in a round",
            ({ there }) => seconds(middle(there.map((view) => view.train_seconds))),
            "n",
          ],
        ],
        rows,
      ),
    "Times are medians over the tier's devices. Accuracies on devices belong to their newest " +
    "update and their held-out samples.",
  );
  const told = [
    ["best", best],
    ["newest", versions.filter((view) => view.score !== null).at(-1)],
  ].filter(([, view], at) => view && (at === 0 || view !== best));
  const columns = told.flatMap(([which, view]) =>
    Object.entries(view.labels).map(([name, shares]) => [`${which}, ${name}`, shares]),
  );
  part("labels", "Accuracy by label", columns, () =>
    columns.length
      ? table(
          "labels",
          "The share of each label's samples that were classified correctly",
          [
            ["label", (label) => String(label), "n"],
            ...columns.map(([name, shares]) => [name, (label) => number(shares[label]), "n"]),
          ],
          columns[0][1].map((_, label) => label),
        )
      : el("p", { class: "note" }, ...sentence("Unknown: export with `--metrics f1`.")),
  );
}

// ---- comparison of methods: runs of this store, and files that the user has opened here

const MOST_SIDES = 6;
const MOST_BYTES = 30e6;
const over = (id) => state.runs.find((view) => view.run.id === id)?.run.ended_at;
const sides = () =>
  [...new Set([state.status.run?.id, ...(place().with ?? "").split(",")])]
    .filter((id) => state.runs.some((view) => view.run.id === id))
    .slice(0, MOST_SIDES);
const READ = {
  accuracy: (view) => view.round.evaluation?.accuracy,
  loss: (view) => view.round.evaluation?.loss,
  "mean on devices": (view) => view.device_accuracy,
};
// The figure of a seed in a table of `shoal reproduce`: the mean of its last evaluations, or only
// the last one, or a value without a round; null if the target was never reached.
const deciding = (row) => {
  const cell = [row.decides, row.last, row.best].find(
    (value) => value !== undefined && value !== "",
  );
  return cell === undefined ? null : +cell;
};
const mean = (values) =>
  !values.length || values.includes(null)
    ? null
    : values.reduce((sum, value) => sum + value, 0) / values.length;
const TOOK = {
  round: null,
  "bytes so far": (view) => view.sent_bytes + view.received_bytes,
  "seconds so far": (view) => view.seconds ?? 0,
};

// The rounds of a run; those of an ended run are requested once.
async function curve(id) {
  if (!state.ended.has(id)) {
    const found = (await api(`runs/${encodeURIComponent(id)}/rounds?tasks=false`)).filter(ended);
    if (!over(id)) return found;
    state.ended.set(id, found);
  }
  return state.ended.get(id);
}

// Rows of comma-separated values of `shoal reproduce`, by the names in the first line.
function separated(text) {
  const [head, ...rows] = text
    .trim()
    .split(/\r?\n/)
    .map((line) =>
      [...line.matchAll(/("(?:[^"]|"")*"|[^,]*)(?:,|$)/g)]
        .slice(0, -1)
        .map(([, cell]) => cell.replace(/^"|"$/g, "").replaceAll('""', '"')),
    );
  return rows.map((cells) => Object.fromEntries(head.map((name, at) => [name, cells[at] ?? ""])));
}

const ours = (rows) =>
  rows.length && rows.every((row) => row.arm && row.figure && Number.isFinite(deciding(row) ?? 0));

// Converts the flat output of `shoal rounds --json` to the form of the API; the page of methods
// reads only these values.
function unflat(row) {
  const judged = Object.keys(row).filter(
    (name) => name.startsWith("round.evaluation.") && row[name] !== null,
  );
  const tiers = {};
  for (const name of judged) {
    const found = /^round\.evaluation\.tiers\.(.+)\.accuracy$/.exec(name);
    if (found) tiers[found[1]] = { accuracy: row[name] };
  }
  return {
    ...row,
    round: {
      number: row["round.number"],
      evaluation: judged.length
        ? {
            accuracy: row["round.evaluation.accuracy"],
            loss: row["round.evaluation.loss"],
            tiers,
            metrics: [],
          }
        : null,
    },
  };
}

async function openFiles(list) {
  for (const file of list) {
    try {
      if (file.size > MOST_BYTES)
        throw new Error(`it has ${size(file.size)}, more than ${size(MOST_BYTES)}`);
      const text = await file.text();
      const found = text.trimStart().startsWith("[") ? JSON.parse(text) : separated(text);
      if (found.length && found.every((row) => Number.isInteger(row["round.number"]))) {
        state.files.set(file.name, { curve: found.map(unflat) });
        continue;
      }
      if (found.length && found.every((view) => Number.isInteger(view.round?.number)))
        state.files.set(file.name, { curve: found });
      else if (ours(found)) state.files.set(file.name, { table: found });
      else throw new Error("it contains neither the rounds of a run nor a table");
      at("said").textContent = "";
    } catch (error) {
      at("said").className = "error";
      at("said").textContent =
        `Cannot show ${file.name}: ${error.message}. ` +
        "Open output of shoal rounds --json, or a .csv of shoal reproduce.";
    }
  }
  draw();
}

function publishedText(arm) {
  if (arm.published === null) return "-";
  const spread = arm.spread ? ` ± ${number(+arm.spread, 2)}` : "";
  return `${number(arm.published, 2)}${spread} ${arm.unit}`;
}

// The values of an arm in a table: the mean over its seeds, each seed, and the published value.
function arms(name, rows) {
  const groups = new Map();
  for (const row of rows)
    groups.set(`${name} ${row.arm} ${row.figure}`, [
      ...(groups.get(`${name} ${row.arm} ${row.figure}`) ?? []),
      row,
    ]);
  return [...groups].map(([key, found]) => ({
    key,
    table: name,
    arm: found[0].arm,
    figure: found[0].figure,
    scale: found[0].scale ?? "",
    unit: found[0].unit,
    note: found[0].note ?? "",
    seeds: found.map(deciding),
    published: found[0].published === "" ? null : +found[0].published,
    spread: found[0].published_spread,
    mean: mean(found.map(deciding)),
  }));
}

function methods() {
  const { runs, files } = state;
  const { of: which, over } = place();
  const of = READ[which] ? which : "accuracy";
  const across = over in TOOK ? over : "round";
  const chosen = sides();
  const view = (id) => runs.find((found) => found.run.id === id);
  const curves = [
    ...(state.detail.curves ?? []),
    ...[...files].filter(([, file]) => file.curve).map(([name, file]) => [name, file.curve]),
  ];
  const given = Object.entries(state.detail.tables)
    .filter(([, rows]) => ours(rows))
    .map(([name, table]) => [name, { table }]);
  const told = [...given, ...files].flatMap(([name, file]) =>
    file.table ? arms(name, file.table) : [],
  );
  const drawn = told.filter((arm) => state.drawn.has(arm.key));
  const titled = (id) => (view(id) ? `${titleOf(view(id))} ${id}` : id);
  const pick = (id, text, given, now) =>
    el(
      "label",
      {},
      `${text} `,
      el(
        "select",
        { id, onchange: (event) => go({ [id]: event.target.value }) },
        Object.keys(given).map((name) =>
          el("option", { value: name, selected: name === now }, name),
        ),
      ),
    );
  part(
    "choose",
    "",
    [changing(runs), chosen, [...files.keys()], of, across],
    () => [
      el(
        "p",
        { class: "note" },
        ...sentence(
          "Runs of this store on one chart, with the tables next to the store and the files that " +
          "you open here; these stay in this browser: rounds of another store " +
            "(`shoal rounds --json`), and tables of `shoal reproduce` (`.csv`) with the " +
            "published values.",
        ),
      ),
      !runs.length
        ? ""
        : el(
            "fieldset",
            { class: "row" },
            el("legend", {}, `Runs, at most ${MOST_SIDES}`),
            runs.map((found) => {
              const { id } = found.run;
              return el(
                "label",
                {},
                el("input", {
                  type: "checkbox",
                  id: `side-${id}`,
                  checked: chosen.includes(id),
                  disabled:
                    id === chosen[0] || (chosen.length >= MOST_SIDES && !chosen.includes(id)),
                  onchange: (event) =>
                    go({
                      with: event.target.checked
                        ? [...chosen.slice(1), id]
                        : chosen.slice(1).filter((other) => other !== id),
                    }),
                }),
                ` ${titled(id)}, ${found.run.status}`,
              );
            }),
          ),
      el(
        "p",
        { class: "row" },
        pick("of", "Show", READ, of),
        pick("over", "over", TOOK, across),
        el(
          "label",
          {},
          "Open ",
          el("input", {
            type: "file",
            id: "files",
            multiple: true,
            accept: ".csv,.json",
            onchange: (event) => openFiles([...event.target.files]),
          }),
        ),
        ...[...files.keys()].map((name) =>
          el(
            "button",
            {
              type: "button",
              onclick: () => {
                files.delete(name);
                draw();
              },
            },
            `Close ${name}`,
          ),
        ),
      ),
    ],
  );
  const lines = curves.map(([id, rounds]) => {
    let sum = 0;
    return [
      titled(id),
      new Map(
        rounds.map((one) => [
          TOOK[across] ? (sum += TOOK[across](one)) : one.round.number,
          READ[of](one) ?? null,
        ]),
      ),
    ];
  });
  const x = [...new Set(lines.flatMap(([, points]) => [...points.keys()]))].sort((a, b) => a - b);
  const flat = (value) => x.map(() => value / 100);
  if (!x.length && drawn.length) x.push(0, 1);
  part("sides", "Side by side", 1, () => el("div", { class: "charts one" }));
  const made = chart(
    "sides-chart",
    `${capital(of)} over ${across === "round" ? "rounds" : across}`,
    x,
    [
      ...lines.map(([name, points]) => [name, x.map((key) => points.get(key) ?? null)]),
      ...(of === "accuracy"
        ? drawn.flatMap((arm) => [
            ...(arm.mean === null ? [] : [[`${arm.arm}, here`, flat(arm.mean), true]]),
            ...(arm.published === null
              ? []
              : [[`${arm.arm}, published`, flat(arm.published), true]]),
          ])
        : []),
    ],
    undefined,
    across,
  );
  const box = at("sides").querySelector(".charts");
  if (made.parentNode !== box) box.replaceChildren(made);
  const rows = curves.map(([id, rounds]) => {
    const judged = rounds.filter((one) => one.round.evaluation);
    const newest = judged.at(-1)?.round.evaluation;
    const known = judged
      .map((one) => one.round.evaluation.accuracy)
      .filter((value) => value !== null);
    const tiers = Object.values(newest?.tiers ?? {})
      .map((tier) => tier.accuracy)
      .filter((value) => value !== null);
    return {
      id,
      rounds,
      newest,
      best: known.length ? Math.max(...known) : null,
      apart: tiers.length
        ? Math.max(newest.accuracy, ...tiers) - Math.min(newest.accuracy, ...tiers)
        : null,
      bytes: rounds.reduce((sum, one) => sum + one.sent_bytes + one.received_bytes, 0),
      took: rounds.reduce((sum, one) => sum + (one.seconds ?? 0), 0),
    };
  });
  part("summed", "In numbers", rows, () =>
    table(
      "summed",
      "Selected runs",
      [
        [
          "run",
          (row) => (view(row.id) ? link({ view: "run", run: row.id }, titled(row.id)) : row.id),
        ],
        ["model", (row) => view(row.id)?.run.arch ?? "-"],
        ["rounds", (row) => row.rounds.length, "n"],
        ["best accuracy", (row) => number(row.best), "n"],
        ["newest accuracy", (row) => number(row.newest?.accuracy), "n"],
        ["newest loss", (row) => number(row.newest?.loss), "n"],
        ["spread of tiers", (row) => number(row.apart), "n"],
        [
          "mean on devices",
          (row) =>
            number(
              row.rounds
                .map((one) => one.device_accuracy)
                .filter((value) => value !== null)
                .at(-1),
            ),
          "n",
        ],
        ["weights and updates", (row) => size(row.bytes), "n"],
        ["time", (row) => seconds(row.took), "n"],
      ],
      rows,
    ),
  );
  const flatten = (value, key = "") =>
    value && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).flatMap(([name, item]) =>
          flatten(item, key ? `${key}.${name}` : name),
        )
      : [[key, JSON.stringify(value)]];
  const settings = chosen.map((id) => new Map(flatten(view(id).run.config)));
  const keys = [...new Set(settings.flatMap((found) => [...found.keys()]))]
    .filter((key) => new Set(settings.map((found) => found.get(key))).size > 1)
    .sort();
  if (chosen.length > 1)
    part("settings", "", [chosen, keys, state.all.has("settings")], () =>
      table(
        "settings",
        "Differing settings",
        [
          ["setting", (key) => key],
          ...chosen.map((id, at) => [titled(id), (key) => settings[at].get(key) ?? "-", "long"]),
        ],
        keys,
        true,
      ),
    );
  else at("settings")?.remove();
  if (!told.length) at("arms")?.remove();
  else
    part(
      "arms",
      "Comparison with published values",
      [told, drawn.map((arm) => arm.key), state.all.has("arms"), of],
      () => {
        const most = new Map();
        for (const arm of told)
          most.set(
            arm.unit,
            Math.max(
              most.get(arm.unit) ?? 0,
              ...arm.seeds.map((value) => value ?? 0),
              arm.published ?? 0,
            ),
          );
        const mark = (arm, value, kind) => {
          const piece = el("i", { class: kind });
          piece.style.left = `${(98 * Math.max(0, value)) / (most.get(arm.unit) || 1)}%`;
          return piece;
        };
        const notes = [...new Set(told.map((arm) => arm.note).filter(Boolean))].map((note) =>
          el("p", { class: "warn" }, note),
        );
        return [
          ...notes,
          el(
            "p",
            { class: "row" },
            el(
              "span",
              { class: "legend" },
              el("span", { class: "swatch here" }),
              "here, one mark per seed",
            ),
            el("span", { class: "legend" }, el("span", { class: "swatch paper" }), "published"),
          ),
          table(
            "arms",
            "Arms of the tables; bars run from 0 to the largest value of the unit",
            [
              ["arm", (arm) => arm.arm],
              ["figure", (arm) => arm.figure],
              ["scale", (arm) => arm.scale],
              [
                "picture",
                (arm) =>
                  el(
                    "span",
                    { class: "bar marks" },
                    arm.seeds
                      .filter((value) => value !== null)
                      .map((value) => mark(arm, value, "here")),
                    arm.published === null ? "" : mark(arm, arm.published, "paper"),
                  ),
              ],
              [
                "here",
                (arm) => (arm.mean === null ? "not reached" : `${number(arm.mean, 2)} ${arm.unit}`),
                "n",
              ],
              ["seeds", (arm) => arm.seeds.length, "n"],
              ["published", publishedText, "n"],
              [
                "here - published",
                (arm) =>
                  arm.published === null || arm.mean === null
                    ? "-"
                    : number(arm.mean - arm.published, 2),
                "n",
              ],
              [
                "chart",
                (arm) =>
                  arm.unit === "%" && arm.mean !== null && of === "accuracy"
                    ? el(
                        "label",
                        {},
                        el("input", {
                          type: "checkbox",
                          id: `draw-${arm.key}`,
                          "aria-label": `Draw ${arm.arm}, ${arm.figure}`,
                          checked: state.drawn.has(arm.key),
                          onchange: (event) => {
                            state.drawn[event.target.checked ? "add" : "delete"](arm.key);
                            draw();
                          },
                        }),
                      )
                    : "-",
              ],
              ["table", (arm) => arm.table],
            ],
            told,
            true,
          ),
        ];
      },
    );
}

function artifacts() {
  const found = state.detail.artifacts;
  const worst = (tier) =>
    tier.checks.reduce((a, b) => (a && a.worst_relative > b.worst_relative ? a : b), null);
  part("sets", "Exported sets", found, () =>
    table(
      "sets",
      "One row for each tier; the deviation is from PyTorch, relative to the largest value of a " +
        "tensor",
      [
        ["tier", (tier) => tier.tier],
        ["width", (tier) => tier.width, "n"],
        ["depth", (tier) => tier.depth, "n"],
        ["labels", (tier) => tier.classes, "n"],
        ["MFLOPs, forward", (tier) => number(tier.flops_per_sample / 1e6, 2), "n"],
        ["MFLOPs, training", (tier) => number(tier.flops_per_step_sample / 1e6, 2), "n"],
        ["peak memory", (tier) => size(tier.peak_memory_bytes), "n"],
        [
          "largest deviation",
          (tier) => (worst(tier) ? worst(tier).worst_relative.toExponential(1) : "-"),
          "n",
        ],
        ["in", (tier) => worst(tier)?.worst_tensor ?? "-"],
        [
          "left out",
          (tier) =>
            Object.entries(tier.skipped)
              .map(([format, why]) => `${format}: ${why}`)
              .join("; ") || "-",
          "long",
        ],
      ],
      found,
    ),
  );
}

// ---- rollouts of releases

const STEERS = {
  pause: ["Pause", "Pause the rollout? Boards that were already asked continue."],
  resume: ["Resume", "Resume the rollout?"],
  stop: ["Stop", "Stop the rollout for good? Boards that run the release keep it."],
}; // verbs of a rollout

function rollouts() {
  const [newest, ...past] = state.detail.rollouts;
  if (!newest)
    return part("none", "", 1, () =>
      el("p", { class: "note" }, sentence("No release yet. Start one with `shoal rollout start`.")),
    );
  const counts = ({ rollout, boards }) => {
    const of = (found) => Object.values(boards).filter(found).length;
    const failed = of((outcome) => outcome.startsWith("failed"));
    const running = of((outcome) => outcome === "running");
    const asked = Object.keys(rollout.asked).length;
    return { asked, running, failed, under: asked - running - failed };
  };
  const listed = (view) =>
    Object.entries(view.boards)
      .map(([id, outcome]) => ({ id, outcome, version: view.versions[id] ?? "-" }))
      .sort((a, b) => rank(a) - rank(b) || (a.id < b.id ? -1 : 1));
  const rank = ({ outcome }) =>
    outcome.startsWith("failed") ? 0 : outcome === "not asked" ? 3 : outcome === "running" ? 2 : 1;
  const { rollout, verbs } = newest;
  const boards = listed(newest);
  const told = counts(newest);
  const percent = (share) => `${+(100 * share).toPrecision(3)} %`;
  const tone = (outcome) =>
    outcome === "running" ? "good" : outcome.startsWith("failed") ? "bad" : "";
  const named = (name) => (state.status.run ? link({ view: "device", device: name }, name) : name);
  part(
    "release",
    `Release ${rollout.release.number}`,
    [newest, acts()],
    () => [
      acts() && verbs.length
        ? el(
            "p",
            { class: "row" },
            verbs
              .filter((name) => STEERS[name])
              .map((name) => verb(name, ...STEERS[name], {}, `rollout/actions/${name}`)),
          )
        : "",
      tiles({
        "state": newest.state,
        asked: `${told.asked} of ${boards.length}`,
        running: told.running,
        "in progress": told.under,
        failed: told.failed,
        "for boards": Object.keys({ ...rollout.release.builds, ...rollout.release.sets }).join(
          ", ",
        ),
      }),
      rollout.stopped ? el("p", { class: "row error" }, `Stopped: ${rollout.stopped}.`) : "",
    ],
    `It stops automatically if more than ${percent(rollout.most_failed)} of the asked boards ` +
    `fail; a board that is not back within ${seconds(rollout.within_seconds)} has failed.`,
  );
  const aims = rollout.stages.map((share) => Math.ceil(share * boards.length));
  const current = aims.findIndex((aim) => told.asked <= aim);
  part("stages", "Stages", [rollout.stages, aims, told, newest.state], () =>
    table(
      "stages",
      "A stage begins when all boards of the previous stages have finished",
      [
        ["stage", ([, at]) => String(at + 1)],
        ["share", ([share]) => percent(share), "n"],
        ["boards in all", ([, at]) => aims[at], "n"],
        [
          "state",
          ([, at]) =>
            told.asked > aims[at] || (told.asked === aims[at] && !told.under)
              ? "over"
              : newest.state !== "going"
                ? "not reached"
                : told.asked && at === current
                  ? "going"
                  : "waits",
        ],
      ],
      rollout.stages.map((share, at) => [share, at]),
    ),
  );
  part("boards", "Boards", [boards, rollout.asked, state.all.has("boards")], () =>
    table(
      "boards",
      "All boards that accept releases; failed boards come first",
      [
        ["board", (board) => named(board.id)],
        [
          "release",
          (board) => el("span", { class: tone(board.outcome) }, board.outcome.split(":")[0]),
          "id",
        ],
        ["why", (board) => board.outcome.split(": ").slice(1).join(": ") || "-", "long"],
        ["asked", (board) => clock(rollout.asked[board.id]), "id"],
        ["Shoal", (board) => board.version],
      ],
      boards,
      true,
    ),
  );
  part("past", "Earlier releases", [past, state.all.has("past")], () =>
    table(
      "past",
      "Newest first, in their state when the next release replaced them",
      [
        ["release", (view) => String(view.rollout.release.number), "id"],
        ["asked", (view) => counts(view).asked, "n"],
        ["running", (view) => counts(view).running, "n"],
        ["failed", (view) => counts(view).failed, "n"],
        ["in progress", (view) => counts(view).under, "n"],
        ["stopped because", (view) => view.rollout.stopped || "-", "long"],
        [
          "what failed",
          (view) => {
            const failed = listed(view).filter((board) => rank(board) === 0);
            return failed.length
              ? el(
                  "details",
                  {},
                  el("summary", {}, `${failed.length} board${failed.length > 1 ? "s" : ""}`),
                  el(
                    "ul",
                    {},
                    failed.map((board) => el("li", {}, named(board.id), ` ${board.outcome}`)),
                  ),
                )
              : "-";
          },
          "long",
        ],
      ],
      past,
      true,
    ),
  );
}

// ---- navigation and requests

const place = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const go = (more) => {
  location.hash = new URLSearchParams({ ...place(), ...more });
};
const DRAWN = {
  __proto__: null,
  fleet,
  run,
  round,
  device,
  coverage: covered,
  models,
  methods,
  artifacts,
  rollouts,
};

const NO_ANSWER = "the server does not answer";

async function api(path) {
  const answer = await fetch(`api/v1/${path}`, { headers: { Accept: "application/json" } }).catch(
    () => {
      throw Object.assign(new Error(NO_ANSWER), { status: LOST });
    },
  );
  const found = await answer
    .json()
    .catch(() => ({ detail: `the server answered ${answer.status}` }));
  if (!answer.ok)
    throw Object.assign(
      new Error(typeof found.detail === "string" ? found.detail : "the server refused the request"),
      { status: answer.status },
    );
  return found;
}

const of = (more = "") => `runs/${encodeURIComponent(state.status.run.id)}${more}`;

async function detail() {
  const hash = location.hash;
  const { view, device: name, round: which } = place();
  const query = (more) =>
    new URLSearchParams(
      Object.entries(more).filter(([, value]) => value !== undefined && value !== ""),
    );
  let found = {};
  if (view === "rollouts") found = { rollouts: await api("rollout") };
  else if (view === "methods")
    found = {
      tables: await api("tables"),
      curves: await Promise.all(sides().map(async (id) => [id, await curve(id)])),
    };
  else if (!state.status.run) found = {};
  else if (view === "round")
    found = {
      tasks: (await api(of(`/rounds?first=${+which}&last=${+which}`)))[0]?.tasks ?? [],
      explained: await api(of(`/rounds/${+which}`)),
    };
  else if (view === "device")
    found = {
      tasks: await api(of(`/devices/${encodeURIComponent(name)}`)),
      lines: await readLog(state.status.run, name),
    };
  else if (view === "models") {
    // The artifacts may be gone; the versions are not.
    found = { artifacts: await api(of("/artifacts")).catch(() => []) };
  } else if (view === "artifacts") found = { artifacts: await api(of("/artifacts")) };
  else if (view === "coverage") {
    const get = (more) => api(of(`/coverage?${query({ last: state.round, ...more })}`));
    const whole = await get({});
    const tiers = whole.tiers.length > 1 ? whole.tiers.slice(0, 6) : [];
    found = {
      maps: [
        ["All updates", whole],
        ...(await Promise.all(tiers.map(async (tier) => [`Tier ${tier}`, await get({ tier })]))),
        ...(name ? [[`Device ${name}`, await get({ device: name })]] : []),
      ],
    };
  }
  // The user may have opened another view meanwhile.
  if (location.hash === hash) Object.assign(state, { detail: found, detailOf: hash });
}

async function read() {
  const wanted = place().run;
  [state.access, state.runs, state.status] = await Promise.all([
    api("access"),
    api("runs"),
    api(wanted ? `runs/${encodeURIComponent(wanted)}` : "status"),
  ]);
  const run = state.status.run;
  at("operator").hidden = acts() || !state.access.offered;
  at("role").hidden = !acts();
  at("asof").textContent = `as of ${new Date(state.status.as_of * 1000).toLocaleTimeString("sv")}`;
  if (state.of !== run?.id) {
    state.of = run?.id;
    state.rounds.clear();
    state.devices = state.advice = null;
    state.round = undefined;
    state.log = await readLog(run);
  }
  if (!run) {
    state.devices = [];
    state.versions = [];
    return;
  }
  if (
    state.devices &&
    ["run", "round", "coverage", "methods", "artifacts", "rollouts"].includes(place().view)
  )
    return;
  [state.devices, state.versions] = await Promise.all([api(of("/devices")), api(of("/versions"))]);
}

// The newest rounds, and all rounds for the curves; ended rounds are requested once.
async function history() {
  if (state.loading) return;
  state.loading = true;
  try {
    await fetchRounds();
    if (!DRAWN[place().view] || place().view === "fleet") {
      state.advice = await api(of("/advice"));
      draw();
    }
  } finally {
    state.loading = false;
  }
}

async function fetchRounds() {
  const known = [...state.rounds.keys()];
  const over = known.filter((number) => state.rounds.get(number).round.ended_at);
  const get = async (first, last) => {
    for (const view of await api(of(`/rounds?tasks=false&first=${first}&last=${last}`)))
      state.rounds.set(view.round.number, view);
    draw();
  };
  const newest = state.status.round?.number ?? 0;
  const from = known.length
    ? Math.min(...known.filter((number) => !over.includes(number)), Math.max(1, ...over))
    : newest - CHUNK + 1; // a round is evaluated during the next one
  if (newest >= from) await get(Math.max(1, from), newest);
  for (
    let last = Math.min(...state.rounds.keys()) - 1;
    last >= 1 && Number.isFinite(last) && place().view === "run";
    last -= CHUNK
  )
    await get(Math.max(1, last - CHUNK + 1), last);
}

function draw(again = false) {
  const began = performance.now();
  const here = place();
  const view = DRAWN[here.view] ? here.view : "fleet";
  const run = state.status.run;
  if (state.login) return; // until the user has logged in or opens another view
  if (state.detailOf !== location.hash) return; // drawn when its data has arrived
  const title = { round: `Round ${here.round}`, device: here.device }[view] ?? VIEWS[view];
  const key = `${view} ${here.device ?? ""} ${here.round ?? ""} ${run?.id}`;
  if (state.shown !== key || again === "fresh") {
    at("content").replaceChildren();
    state.charts.forEach((known) => known.plot?.destroy());
    state.charts.clear();
    state.shown = key;
  }
  at("title").textContent = title;
  document.title = `${title} - Shoal`;
  at("fleet").textContent = run ? `${run.fleet}, ${run.arch}` : "";
  at("views").replaceChildren(
    ...Object.entries(VIEWS).map(([name, text]) => {
      const made = link({ view: name }, text);
      if (name === view) made.setAttribute("aria-current", "page");
      return made;
    }),
  );
  if (
    at("runs").shown !==
    JSON.stringify([changing(state.runs), run?.id])
  ) {
    at("runs").shown = JSON.stringify([
      changing(state.runs),
      run?.id,
    ]);
    at("runs").replaceChildren(
      ...state.runs.map((found) =>
        el(
          "option",
          { value: found.run.id, selected: found.run.id === run?.id },
          `${named(found)}, ${found.run.status} (${found.run.id})`,
        ),
      ),
    );
  }
  if (!run && !ALONE.includes(view))
    part("none", "", 1, () => el("p", { class: "note" }, "No run yet."));
  else DRAWN[view]();
  at("main").dataset.shown = location.hash.slice(1);
  performance.measure("update", { start: began });
}

function failed(error) {
  if (error.status === 401) return login();
  state.lost = error.status === LOST;
  if (state.lost) {
    at("live").textContent = NO_ANSWER;
    if (state.shown) return; // the newest known state stays
  }
  at("title").textContent =
    { [LOST]: "No answer", 404: "Not found" }[error.status] ?? "This view cannot be shown";
  at("content").replaceChildren(
    el("p", { class: "error", role: "alert" }, `${capital(error.message)}.`),
    state.lost
      ? el(
          "p",
          {},
          sentence("Start it again with `shoal view` or `shoal up`; this page then continues."),
        )
      : el("p", {}, el("a", { href: "#" }, "Back to the fleet")),
  );
  state.shown = "";
}

function login() {
  const box = el("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
  });
  const said = el("p", { role: "alert" });
  const send = async (event) => {
    event.preventDefault();
    const answer = await fetch("login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token: box.value }),
    }).catch(() => null);
    if (!answer) said.textContent = `${capital(NO_ANSWER)}.`;
    else if (answer.ok) {
      state.login = false;
      state.of = undefined;
      state.busy = false;
      at("said").textContent = "";
      start();
    } else {
      said.textContent = (await answer.json()).detail;
      box.select();
    }
  };
  const leave = () => {
    state.login = false;
    draw("fresh");
  };
  at("title").textContent = "Log in";
  state.shown = "";
  state.login = true;
  at("content").replaceChildren(
    el(
      "form",
      { onsubmit: send },
      el(
        "p",
        { class: "note" },
        "The token is in the file of --token-file, the operators' token in " +
        "operator.token of the store.",
      ),
      el(
        "p",
        { class: "row" },
        el("label", {}, "Token ", box),
        el("button", {}, "Log in"),
        state.status ? el("button", { type: "button", onclick: leave }, "Cancel") : "",
      ),
      said,
    ),
  );
  box.focus();
}

async function refresh() {
  if (state.busy) {
    state.again = true;
    return;
  }
  state.busy = true;
  state.again = false;
  const began = performance.now();
  try {
    await read();
    state.lost = false;
    await detail();
    draw();
    if (state.status.run) await history();
  } catch (error) {
    failed(error);
  }
  // The longer the server took, the longer the page waits.
  setTimeout(
    () => {
      state.busy = false;
      if (state.again) refresh();
    },
    Math.max(1000, SHARE * (performance.now() - began)),
  );
}

async function navigate() {
  state.login = false;
  try {
    if (place().run && place().run !== state.of) await read();
    state.playing = false;
    state.round = undefined;
    await detail();
    const before = state.shown;
    draw();
    // A selection within a view keeps the scroll position.
    if (state.shown !== before) at("main").focus({ preventScroll: true });
    if (state.status.run) await history();
    refresh();
  } catch (error) {
    failed(error);
  }
}

async function start() {
  await refresh();
  if (state.lost && !state.log) setTimeout(start, RETRY_MS);
  if (!state.log || state.source) return;
  const source = (state.source = new EventSource(
    `api/v1/events?after=${state.lastLine ?? state.log.at(-1)?.id ?? 0}`,
  ));
  source.addEventListener("line", (event) => {
    const line = JSON.parse(event.data);
    state.lastLine = line.id;
    if (LINES[state.lines].fits(line)) state.log.push(line);
    state.log.splice(0, Math.max(0, state.log.length - 500));
    state.frame ??= requestAnimationFrame(() => {
      state.frame = null;
      draw();
    });
  });
  source.addEventListener("change", refresh);
  source.onopen = () => {
    at("live").textContent = "live";
    if (!state.lost) return;
    state.busy = false; // the wait after the last answer does not matter any more
    refresh();
  };
  source.onerror = () => {
    at("live").textContent = NO_ANSWER;
    if (source.readyState !== EventSource.CLOSED) return; // it retries automatically
    // The response was not a stream, for example from a proxy or because the login expired; the
    // page then opens another source.
    state.source = null;
    if (!state.login) setTimeout(start, RETRY_MS);
  };
}

addEventListener("hashchange", navigate);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw("fresh"));
addEventListener("resize", () => {
  clearTimeout(state.resize);
  state.resize = setTimeout(() => draw("fresh"), 200);
});
at("operator").addEventListener("click", login);
at("runs").addEventListener("change", (event) => go({ run: event.target.value }));
start();
