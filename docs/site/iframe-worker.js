// Search runs in a Worker, and browsers start none for a page that was opened from a disk. There, a hidden frame that loads
// the same script takes its place: what it posts comes out here, and what is posted here goes in.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script src="${url}"></script>`
      this.loaded = new Promise(resolve => {
        this.frame.addEventListener("load", () => {
          const inner = this.frame.contentWindow
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          resolve(inner)
        })
      })
      document.body.append(this.frame)
    }

    // Messages wait for the script, and keep their order.
    postMessage(data) {
      this.loaded.then(inner => inner.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
