// The pack's own words in the editor's language, from locales/<language>/main.json.

import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";

const languages = await api.getCustomNodesI18n().catch(() => ({}));

/** The text of that name, in English where the language has none; the name itself where nothing has it. */
export function text(name) {
  const language = app.extensionManager?.setting.get("Comfy.Locale");
  return languages[language]?.quantwm?.[name] ?? languages.en?.quantwm?.[name] ?? name;
}
