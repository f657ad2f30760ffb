// The chat: what was said, the answer that streams, and the sampling controls.

import { call, events } from "./events.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty", "presence_penalty",
  "frequency_penalty",
];

const history = []; // { role, content }
let model = null;
let running = null; // the AbortController of the answer that streams

export function setModel(name) {
  model = name;
}

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("new-chat").addEventListener("click", newChat);
  $("settings").addEventListener("toggle", () => follow(true)); // the log has another height now
  $("sampling").addEventListener("submit", (event) => event.preventDefault());
  $("sampling").addEventListener("input", countChanges);
  $("sampling").addEventListener("reset", () => setTimeout(countChanges));
  for (const example of $("examples").querySelectorAll("button")) {
    example.addEventListener("click", () => {
      $("prompt").value = example.textContent;
      send();
    });
  }
  countChanges();
}

function newChat() {
  running?.abort();
  running = null;
  setRunning(false);
  history.length = 0;
  $("messages").replaceChildren();
  $("empty").hidden = false;
  $("announcer").textContent = "New chat";
  $("prompt").focus();
}

async function send() {
  const text = $("prompt").value.trim();
  if (running !== null || text === "") return;
  if (!$("sampling").checkValidity()) {
    $("settings").open = true;
    $("sampling").reportValidity();
    return;
  }
  $("empty").hidden = true;
  $("prompt").value = "";
  history.push({ role: "user", content: text });
  new Message("user", "You").write(text);
  const answer = new Message("assistant", "Model");
  const controller = new AbortController();
  running = controller;
  setRunning(true);
  let failure = null;
  try {
    await stream(answer, controller.signal);
  } catch (error) {
    failure = error;
  }
  if (running !== controller) return; // a new chat has begun meanwhile
  running = null;
  setRunning(false);
  if (failure === null || controller.signal.aborted) {
    answer.finish(failure === null ? null : "stopped");
    history.push({ role: "assistant", content: answer.content });
  } else {
    answer.fail(failure.message);
    history.pop();
    if ($("prompt").value === "") $("prompt").value = text; // to be sent again
  }
}

async function stream(answer, signal) {
  const response = await call("v1/chat/completions", { body: request(), signal });
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    if (choice) {
      answer.think(choice.delta.reasoning_content ?? "");
      answer.write(choice.delta.content ?? "");
      answer.reason = choice.finish_reason ?? answer.reason;
    }
    answer.usage = chunk.usage ?? answer.usage;
  }
}

function request() {
  const system = $("system").value.trim();
  const messages = system === "" ? history : [{ role: "system", content: system }, ...history];
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  const stops = $("stop_strings").value.split("\n").filter((line) => line !== "");
  if (stops.length > 0) body.stop = stops;
  return body;
}

function setRunning(isRunning) {
  $("stop").hidden = !isRunning;
  $("send").hidden = isRunning;
  // whoever pressed a button that is gone now stays in the composer
  if (document.activeElement === document.body) $(isRunning ? "stop" : "prompt").focus();
  if (isRunning) $("announcer").textContent = "The model answers";
}

function countChanges() {
  const fields = [...$("sampling").querySelectorAll("input, textarea")];
  const count = fields.filter((field) => field.value !== field.defaultValue).length;
  $("changed").textContent = count === 0 ? "model defaults" : `${count} changed`;
}

// One message in the log. What arrives is shown once a frame, not once a token.
class Message {
  constructor(role, who) {
    this.content = "";
    this.reasoning = "";
    this.usage = null;
    this.reason = null;
    this.began = performance.now();
    this.first = null;
    this.due = false;
    this.item = element("li", `message ${role}`);
    this.text = element("div", "text");
    this.thought = null;
    this.item.append(element("div", "who", who), this.text);
    if (role === "assistant") this.item.classList.add("streaming");
    $("messages").append(this.item);
    follow(true);
  }

  think(text) {
    if (text === "") return;
    this.first ??= performance.now();
    this.reasoning += text;
    if (this.thought === null) {
      const details = element("details");
      details.open = true;
      details.append(element("summary", "", "Reasoning"), element("div", "text"));
      this.item.insertBefore(details, this.text);
      this.thought = details.lastChild;
    }
    this.show();
  }

  write(text) {
    if (text === "") return;
    this.first ??= performance.now();
    this.content += text;
    this.show();
  }

  show() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.due = false;
    const atEnd = isAtEnd();
    this.text.textContent = this.content;
    if (this.thought !== null) this.thought.textContent = this.reasoning;
    follow(atEnd);
  }

  finish(note = null) {
    this.item.classList.remove("streaming");
    const seconds = (performance.now() - (this.first ?? this.began)) / 1000;
    const parts = [];
    const tokens = this.usage?.completion_tokens;
    if (tokens !== undefined) parts.push(`${tokens} tokens`);
    if (tokens > 1 && seconds > 0) parts.push(`${speed((tokens - 1) / seconds)} a second`);
    if (this.first !== null) parts.push(`first after ${Math.round(this.first - this.began)} ms`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached > 0) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (this.reason === "length") parts.push("cut at max tokens");
    if (note !== null) parts.push(note);
    this.draw();
    if (parts.length > 0) this.item.append(element("div", "hint", parts.join(" · ")));
    follow(true);
    $("announcer").textContent = `${note === null ? "The model" : "Stopped. The model"} said: ${this.content}`;
  }

  fail(message) {
    this.item.classList.remove("streaming");
    this.item.classList.add("failed");
    this.item.append(element("div", "problem", message));
    this.draw();
    $("announcer").textContent = `Error: ${message}`;
    follow(true);
  }
}

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function speed(rate) {
  return rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function follow(atEnd) {
  if (atEnd) $("log").scrollTop = $("log").scrollHeight;
}
