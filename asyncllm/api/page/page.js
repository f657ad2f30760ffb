// Puts the page together: the model's name, the API key where one is asked for, the chat, the engine.

import { setModel, startChat } from "./chat.js";
import { ApiFailure, call, useKey } from "./events.js";
import { startEngineView } from "./engine.js";

const $ = (id) => document.getElementById(id);

let keyGiven = () => undefined;

// Shows the form for the key; resolves when one was entered.
function askForKey() {
  $("key-form").hidden = false;
  $("connection").textContent = "Waiting for a key";
  if (document.activeElement === document.body) $("key").focus();
  return new Promise((resolve) => {
    const before = keyGiven;
    keyGiven = () => {
      before();
      resolve();
    };
  });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  keyGiven();
  keyGiven = () => undefined;
});

async function findModel() {
  for (;;) {
    try {
      const models = await (await call("v1/models")).json();
      const name = models.data[0].id;
      setModel(name);
      $("model").textContent = name;
      document.title = `${name} · asyncllm`;
      return;
    } catch (error) {
      if (error instanceof ApiFailure && [401, 403].includes(error.status)) await askForKey();
      else await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

startChat();
findModel();
startEngineView(askForKey);
