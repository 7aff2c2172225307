// A chat with the server of this page. Everything that is shown is set as text, never as HTML.
"use strict";

const $ = id => document.getElementById(id);
let messages = [], model = null, key = "", running = null, chosen = null;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const authorization = () => key ? { Authorization: `Bearer ${key}` } : {};
const visible = token => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

async function connect() {
  const response = await fetch("v1/models", { headers: authorization() });
  $("key-form").hidden = response.status !== 401;
  if (!response.ok) return;
  model = (await response.json()).data[0];
  $("model").textContent = `${model.id}, drafter ${model.drafter}`;
}

// The values of the server-sent events of a reply, as they arrive.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Error(parsed.error.message);
      yield parsed;
    }
  }
}

// One answer on the page, and its figures.
class Answer {
  constructor(parent, title) {
    this.box = element("div", "answer");
    this.text = element("div", "text");
    this.figures = element("p", "figures", "waiting");
    this.box.append(element("h3", "", title), this.text, this.figures);
    parent.append(this.box);
    Object.assign(this, { content: "", steps: [], reason: null });
  }

  add(choice) {
    this.reason = choice.finish_reason ?? this.reason;
    for (const step of choice.steps ?? []) this.addStep(step, [...choice.delta.content]);
    this.show();
  }

  addStep(step, characters) {
    const index = this.steps.length, span = element("span", `s${index % 3}`);
    this.steps.push(step);
    this.content += characters.join("");
    const own = characters.splice(step.num_accepted_characters);
    if (characters.length) span.append(element("span", "d", characters.join("")));
    if (own.length) span.append(element("span", "b", own.join("")));
    span.tabIndex = 0;
    span.title = index ? `step ${index}` : "prefill";
    span.onclick = () => showStep(span, step, index);
    span.onkeydown = event => { if (event.key === "Enter") span.onclick(); };
    this.text.append(span);
  }

  show(end = "") {
    const total = name => this.steps.reduce((sum, step) => sum + step[name], 0);
    const count = this.steps.length, tokens = total("num_tokens");
    const length = count > 1 ? ((tokens - this.steps[0].num_tokens) / (count - 1)).toFixed(2) : "–";
    const speed = total("seconds") ? (tokens / total("seconds")).toFixed(1) : "–";
    this.speed = Number(speed);
    const reason = this.reason === "length" ? "; cut at the maximum length" : "";
    this.figures.textContent = `acceptance length ${length}, ${speed} tokens/s, ${tokens} tokens in ${count} steps${reason}${end}`;
  }

  fail(message) { this.box.append(element("p", "error", message)); }
}

// The draft tree of a step as nested lists: a chain is one line, and its branches are below it.
function showStep(span, step, index) {
  chosen?.classList.remove("chosen");
  chosen = span;
  span.classList.add("chosen");
  $("step").hidden = false;
  $("step-title").textContent = index ? `Step ${index}` : "Prefill";
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  $("step-figures").textContent = `${plural(step.num_tokens, "token")}, ${step.path.length} accepted of ` +
    `${plural(step.tokens.length - step.num_scratch, "draft token")}; ${plural(step.num_fed, "token")} fed, ` +
    `${(1000 * step.seconds).toFixed(1)} ms`;
  const children = new Map();
  step.parents.forEach((parent, node) => children.set(parent, [...(children.get(parent) ?? []), node]));
  const path = new Set(step.path), numCandidates = step.tokens.length - step.num_scratch;
  const list = nodes => {
    const drawn = element("ul");
    for (let node of nodes) {
      const line = element("li");
      let below;
      for (;;) {
        const kind = path.has(node) ? " accepted" : node >= numCandidates ? " scratch" : "";
        line.append(element("span", `node${kind}`, visible(step.tokens[node])), " ");
        below = children.get(node) ?? [];
        if (below.length !== 1) break;
        node = below[0];
      }
      if (below.length) line.append(list(below));
      drawn.append(line);
    }
    return drawn;
  };
  const roots = children.get(-1) ?? [];
  $("tree").replaceChildren(roots.length ? list(roots) : element("p", "faint", "Nothing was drafted in this step."));
}

function requestBody(usesDrafter) {
  const system = $("system").value.trim();
  return {
    model: model.id,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    seed: Number($("seed").value),
    max_tokens: Number($("tokens").value),
    stream: true,
    include_steps: true,
    use_drafter: usesDrafter,
  };
}

async function write(answer, body, signal) {
  try {
    const headers = { "Content-Type": "application/json", ...authorization() };
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) for (const choice of chunk.choices) answer.add(choice);
    return true;
  } catch (error) {
    if (error.name === "AbortError") answer.show("; stopped");
    else answer.fail(error.message);
    return false;
  }
}

async function ask(question) {
  const chat = messages;  // "New chat" begins another list
  chat.push({ role: "user", content: question });
  const row = element("div", "answers");
  $("chat").append(element("p", "question", question), row);
  const answer = new Answer(row, `with ${model.drafter}`);
  const alone = $("compare").checked ? new Answer(row, "the base alone") : null;
  const bodies = [requestBody(true), requestBody(false)];
  running = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  const isDone = await write(answer, bodies[0], running.signal);
  if (isDone && alone && await write(alone, bodies[1], running.signal)) {
    const equal = answer.content === alone.content ? "the same text" : "another text";
    answer.show(`; ${(answer.speed / alone.speed).toFixed(2)}× the base alone, ${equal}`);
  }
  if (answer.content) chat.push({ role: "assistant", content: answer.content });
  else chat.pop();  // so that a question which was refused is not sent again
  running = null;
  $("send").disabled = false;
  $("stop").hidden = true;
}

$("form").onsubmit = event => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || !model || running) return;
  $("question").value = "";
  ask(question);
};
$("question").onkeydown = event => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  $("form").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("reset").onclick = () => {
  running?.abort();
  messages = [];
  $("chat").replaceChildren();
  $("step").hidden = true;
};
$("key-form").onsubmit = event => {
  event.preventDefault();
  key = $("key").value;
  connect();
};
connect();
